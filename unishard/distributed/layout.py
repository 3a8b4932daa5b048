"""Which interval of a tensor each rank holds: said by a backend's `layout` before a run. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple


class Layout(NamedTuple):
    """How a tensor is divided: what it lies in is cut into equal parts, one for each rank of a group.

    An interval of a flattened tensor is a `range`. A group is ranks in a row, or of slices, those that have the same.
    """

    numel: int
    """Elements of the tensor."""
    part: int
    """Elements of a part."""
    ranks: int = 1
    """Of a group; 1 if every rank holds all of it."""
    start: int = 0
    """Where the tensor begins in what is cut."""
    padding: int = 0
    """Elements behind it there that belong to no tensor."""
    slices: int = 1
    """Of how many equal parts of a full tensor it is one: neighboring ranks have different ones."""

    def of(self, rank: int) -> range:
        """The elements that a rank of the run holds, of the full tensor."""
        held, before = self._held(rank, self.numel), rank % self.slices * self.numel
        return range(before + held.start, before + held.stop)

    def padded(self, rank: int) -> int:
        """How many elements it has memory for."""
        return len(self._held(rank, self.numel + self.padding))

    @property
    def length(self) -> int:
        """Elements of the whole tensor with its padding."""
        return self.numel + self.padding

    def _held(self, rank: int, end: int) -> range:
        begin = rank // self.slices % self.ranks * self.part - self.start
        return range(min(max(begin, 0), end), min(max(begin + self.part, 0), end))


def whole(numel: int) -> Layout:
    """All of it on every rank."""
    return Layout(numel, numel)


def flat(numel: int, ranks: int) -> Layout:
    """Equal parts of the flattened tensor, the last ones padded."""
    part = -(-numel // ranks)
    return Layout(numel, part, ranks, padding=part * ranks - numel)


def rows(shape: Sequence[int], ranks: int) -> Layout:
    """Equal numbers of rows of the first dimension, as of `torch.chunk`, the last ones padded."""
    count, *rest = shape or (1,)
    row, most = prod(rest), -(-count // ranks)
    return Layout(count * row, most * row, ranks, padding=(most * ranks - count) * row)


def flat_group(numels: Mapping[str, int], ranks: int, *, multiple: int, align: int = 1) -> dict[str, Layout]:
    """Equal parts of several tensors in a row, by name.

    Args:
        numels: Elements of each, in order.
        ranks: Of a group.
        multiple: Of so many elements is the whole row.
        align: At a multiple of so many begins each tensor.
    """
    starts, end = [], 0
    for numel in numels.values():
        starts.append(-(-end // align) * align)
        end = starts[-1] + numel
    starts.append(-(-end // multiple) * multiple)
    return {
        name: Layout(numel, starts[-1] // ranks, ranks, start, following - start - numel)
        for (name, numel), start, following in zip(numels.items(), starts, starts[1:], strict=False)
    }
