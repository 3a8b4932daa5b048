"""Writes a checkpoint beside the training: one at a time, from a copy in host memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from unishard.checkpoint.contents import Stretch
from unishard.checkpoint.saving import Snapshot

__all__ = ["Background", "shared", "staged"]


class Background:
    """At most one piece of work in another thread, whose failure is raised by whoever asks next."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[Any] | None = None

    def start(self, work: Callable[[], Any]) -> None:
        """Begin, when nothing else runs."""
        self.wait()
        self._pool = self._pool or ThreadPoolExecutor(1, "unishard-checkpoint")
        self._running = self._pool.submit(work)

    def wait(self) -> None:
        """Wait until nothing runs.

        Raises:
            CheckpointError: What ran has failed.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait, and let go of the thread."""
        try:
            self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None


_SHARED = Background()


def shared() -> Background:
    """That of this process. All engines share it, since their saves talk over the same connections between the ranks."""
    return _SHARED


@torch.no_grad()
def staged(snapshot: Snapshot) -> Snapshot:
    """The same in memory of its own on the host, so that training may go on."""
    copies = {name: _copy(stretch) for name, stretch in snapshot.stretches.items()}
    if any(stretch.read(stretch.start, stretch.start).is_cuda for stretch in snapshot.stretches.values()):
        torch.cuda.synchronize()
    return snapshot._replace(stretches=copies)


def _copy(stretch: Stretch) -> Stretch:
    values = stretch.read(stretch.start, stretch.end)
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    copy.copy_(values, non_blocking=values.is_cuda)

    def read(begin: int, end: int) -> Tensor:
        return copy[begin - stretch.start : end - stretch.start]

    return stretch._replace(read=read)
