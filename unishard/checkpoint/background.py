"""Writes a checkpoint in a background thread, one at a time, from a copy in host memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.checkpoint.saving import Snapshot
from unishard.distributed import process_group
from unishard.failures.endings import explain_lost_connections

_logger = logging.getLogger("unishard")


class Background:
    """At most one job in a background thread; the next call on this object raises its failure.

    Args:
        ready: Create the process group now, which is collective. If it is created at the first start and a rank is gone
            by then, the other ranks wait for torch's timeout (half an hour, torch 2.13).
    """

    def __init__(self, *, ready: bool = False) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[Any] | None = None
        self._copies: dict[str, Tensor] = {}
        self._group = _borrowed() if ready else None

    def start(self, work: Callable[[dist.ProcessGroup], Any]) -> None:
        """Start a job, after the previous one has finished. Collective the first time, unless created with `ready`.

        Args:
            work: Is passed a process group that nothing else uses: neither the main thread nor another engine's save.
        """
        self.wait()
        self._pool = self._pool or ThreadPoolExecutor(1, "unishard-checkpoint")
        self._group = self._group or _borrowed()
        self._running = self._pool.submit(_logged, work, self._group[0])

    @torch.no_grad()
    def stage(self, snapshot: Snapshot) -> Snapshot:
        """A copy of a snapshot in host memory, so that training can continue. Waits for the previous job.

        The memory is kept for the next save: allocating and pinning it costs more than the copy.
        """
        self.wait()
        before, self._copies = self._copies, {}
        for name, shard in snapshot.shards.items():
            values = shard.read(shard.start, shard.end)
            copy = before.get(name)
            if copy is None or (copy.shape, copy.dtype) != (values.shape, values.dtype):
                copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            self._copies[name] = copy.copy_(values, non_blocking=values.is_cuda)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        staged = {
            name: shard._replace(read=partial(_read, self._copies[name], shard.start))
            for name, shard in snapshot.shards.items()
        }
        return snapshot._replace(shards=staged)

    @property
    def is_running(self) -> bool:
        """Whether a job was started and `wait` was not called since."""
        return self._running is not None

    def wait(self) -> None:
        """Wait until the running job is done.

        Raises:
            CheckpointError: The job failed.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait, and release the thread and the memory."""
        try:
            self.wait()
        finally:
            self._copies.clear()
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None
            if self._group is not None:
                process_group.give_back(*self._group)
                self._group = None


def _borrowed() -> tuple[dist.ProcessGroup, Any]:
    return process_group.borrow_group(), dist.group.WORLD


def _logged(work: Callable[[dist.ProcessGroup], Any], group: dist.ProcessGroup) -> Any:
    """Run the job; log a failure at once, because a script that ends without `close` never sees it."""
    try:
        with explain_lost_connections():
            return work(group)
    except Exception as error:
        if dist.get_rank(group) == 0:
            _logger.error("the save in the background failed: %s", error)
        raise


def _read(copy: Tensor, start: int, begin: int, end: int) -> Tensor:
    return copy[begin - start : end - start]
