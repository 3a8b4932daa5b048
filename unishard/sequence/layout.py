"""Which positions of a sequence each rank of a group has."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PositionRange(NamedTuple):
    """Consecutive positions of one rank."""

    start: int
    """In the whole sequence."""
    length: int


class PositionLayout:
    """The positions of each rank, in runs of equal length.

    Consecutive, one run a rank::

        rank 0  rank 1          size 2, consecutive
        0 1 2 3 4 5 6 7

    Balanced, two runs a rank: under a causal mask a late position attends to more keys than an early one, so each rank
    has a run of both ends::

        rank 0  rank 1  rank 1  rank 0      size 2, balanced
        0 1     2 3     4 5     6 7
    """

    def __init__(self, size: int, *, balanced: bool) -> None:
        self.size = size
        self.balanced = balanced
        self.runs_of_a_rank = 2 if balanced else 1
        self.multiple = size * self.runs_of_a_rank
        """How many runs a sequence has; its length must be a multiple of it."""

    def numbers(self, rank: int) -> tuple[int, ...]:
        """Which of the runs of a sequence a rank has, in the rank's order."""
        return (rank, 2 * self.size - 1 - rank) if self.balanced else (rank,)

    def runs(self, rank: int, length: int) -> list[PositionRange]:
        """The runs of a rank in a sequence of `length`, which is a multiple of `multiple`, in the rank's order."""
        run_length = length // self.multiple
        return [PositionRange(number * run_length, run_length) for number in self.numbers(rank)]

    def take(self, tensor: Tensor, rank: int, dim: int = 1) -> Tensor:
        """A rank's part of a whole tensor."""
        runs = self.runs(rank, tensor.shape[dim])
        return torch.cat([tensor.narrow(dim, run.start, run.length) for run in runs], dim)

    def join(self, parts: Tensor, dim: int) -> Tensor:
        """The whole tensor from the parts of all ranks, joined along `dim` in the order of the ranks."""
        order = self._order
        return self._reordered(parts, dim, [order.index(number) for number in range(self.multiple)])

    def split(self, whole: Tensor, dim: int) -> Tensor:
        """The opposite of `join`."""
        return self._reordered(whole, dim, self._order)

    @property
    def _order(self) -> list[int]:
        """The numbers of the runs, in the order of the ranks."""
        return [number for rank in range(self.size) for number in self.numbers(rank)]

    def _reordered(self, tensor: Tensor, dim: int, order: list[int]) -> Tensor:
        if not self.balanced:
            return tensor
        chunks = tensor.chunk(self.multiple, dim)
        return torch.cat([chunks[number] for number in order], dim)
