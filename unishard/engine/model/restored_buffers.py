"""Buffers that a forward writes and that its recomputation would write again, such as BatchNorm's statistics."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unishard.contract.units import Unit

_SMALL = 2**16
"""Bytes of a buffer up to which it is copied before every forward."""

_logger = logging.getLogger("unishard")


class Start(NamedTuple):
    """A buffer before a forward."""

    owner: nn.Module
    name: str
    live: Tensor
    copy: Tensor | None
    """Its values; None for a large buffer that no forward has written so far."""
    version: int
    """How often the buffer was written; only of one that is not copied."""


class RestoredBuffers:
    """The buffers of a unit whose forward runs twice.

    Versions do not find all writes: codebooks are often written through `data`. So the first forward in training mode
    is judged by values; large buffers that it leaves as they are, such as quantized weights, are not copied again.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._places = [
            (owner, name)
            for owner in unit.module.modules()
            for name, _ in owner.named_buffers(recurse=False, remove_duplicate=False)
        ]
        self._written: set[tuple[int, str]] | None = None
        """Those that a forward has written, by the id of their module, whose hash may change, as that of a metric of
        torchmetrics; None before the first one in training mode."""
        self.steady = not self._places
        """Whether it is known that forwards write none."""

    def read(self) -> list[Start]:
        """The buffers before a forward."""
        copies = _Copies()
        return [
            Start(owner, name, live, None, live._version)
            if live.nbytes > _SMALL and self._written is not None and (id(owner), name) not in self._written
            else Start(owner, name, live, copies.of(live), 0)
            for owner, name in self._places
            if isinstance(live := getattr(owner, name, None), Tensor)
        ]

    def compare(self, starts: list[Start]) -> None:
        """Learn from a forward which buffers it writes.

        Args:
            starts: What `read` returned before it.
        """
        if self._written is None:
            if self._unit.module.training:
                self._written = {(id(start.owner), start.name) for start in starts if _is_written(start)}
                self.steady = not self._written
            return
        for index, start in enumerate(starts):
            if start.copy is None and start.live._version != start.version:
                self._written.add((id(start.owner), start.name))
                self.steady = False
                starts[index] = start._replace(copy=_Copies().of(start.live))
                _logger.warning(
                    "activation_checkpointing: a forward of %s wrote the buffer %s for the first time, so the backward "
                    "of this micro-batch recomputes from the new values; the next ones recompute exactly",
                    *(self._unit.name or "the model", start.name),
                )

    @contextmanager
    def as_before(self, starts: list[Start]) -> Iterator[None]:
        """A block in which buffers have the values that they had before a forward, and whose writes are dropped."""
        now = [(owner, name, getattr(owner, name)) for owner, name, *_ in starts]
        copies = _Copies()
        try:
            for owner, name, live, copy, _ in starts:
                setattr(owner, name, live if copy is None else copies.of(copy))
            yield
        finally:
            for owner, name, buffer in now:
                setattr(owner, name, buffer)


def _is_written(start: Start) -> bool:
    live = getattr(start.owner, start.name)
    return live is not start.live or start.copy is None or not torch.equal(live, start.copy)


class _Copies:
    """Copies of buffers, one for all names of a buffer."""

    def __init__(self) -> None:
        self._found: dict[int, Tensor] = {}

    def of(self, buffer: Tensor) -> Tensor:
        if id(buffer) not in self._found:
            self._found[id(buffer)] = buffer.detach().clone().requires_grad_(buffer.requires_grad)
        return self._found[id(buffer)]
