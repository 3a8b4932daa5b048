"""What a rank remembers of a save, so that the next one of the same tensors is not planned again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from unishard.checkpoint.assignment import Assignment

__all__ = ["PlanCache"]

Key = tuple[int, tuple[bytes, bytes]]
"""Bytes of a chunk, and what the rank holds, as `held.packed` makes it."""


class PlanCache:
    """The plan of the last save of an engine. It covers the tensors that are alike in each save: see `held.divided`."""

    def __init__(self) -> None:
        self._plans = 0
        self.forget()

    def forget(self) -> None:
        """Plan the next save anew, as after a failure, which ranks may notice at different points."""
        self._key: Key | None = None
        self._number = 0
        self.mask = b""
        """Which of its cuts this rank writes."""
        self.lengths: Any = None
        """Lengths of this rank's records."""
        self.assignment: Assignment | None = None
        """On rank 0: what each rank writes."""
        self.everyones: list[Any] = []
        """On rank 0: the lengths of each rank's records."""

    def fits(self, key: Key, group: dist.ProcessGroup | None) -> bool:
        """Whether all ranks hold what they held at the last save, and remember the same plan. Collective if there are ranks."""
        number = self._number if key == self._key else 0
        if dist.is_initialized():
            both = torch.tensor([number, -number])
            dist.all_reduce(both, op=dist.ReduceOp.MIN, group=group)
            number = int(both[0]) if both[0] == -both[1] else 0
        return number > 0

    def remember(self, key: Key, mask: bytes, lengths: Any, assignment: Assignment | None, everyones: list[Any]) -> None:
        """Keep a plan that all ranks have carried out. Called on all of them, or on none."""
        self._plans += 1
        self._key, self._number = key, self._plans
        self.mask, self.lengths, self.assignment, self.everyones = mask, lengths, assignment, everyones
