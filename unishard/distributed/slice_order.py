"""The order in which the elements of a full tensor are counted, where each rank has a slice of it: slice by slice.

In that order a slice is one interval of the full tensor, and so is every shard of a slice. Slices of dimension 0 are
intervals of the flattened tensor as it is, in the order of its memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from unishard.distributed.boxes import Box, boxes


class CountedBox(NamedTuple):
    """A box of the full tensor whose elements are counted in a row."""

    first: int
    """Its first element, in slice order."""
    box: Box

    @property
    def sizes(self) -> tuple[int, ...]:
        """In every dim."""
        return self.box[1]

    @property
    def last(self) -> int:
        """One past its last element, in slice order."""
        return self.first + math.prod(self.sizes)


class SliceOrder(NamedTuple):
    """An order of elements; the default is that of memory.

    A piece is what lies together in both orders but for its place: a slice, or of packed tensors, what a slice has of
    one of them.
    """

    dim: int = 0
    of: int = 1
    """Slices."""
    packed: int = 1
    """Tensors that lie one behind the other along the dimension, each of which is sliced."""

    def counted(self, full: Tensor) -> Tensor:
        """The elements of a full tensor in slice order, flat."""
        if self == MEMORY_ORDER:
            return full.reshape(-1)
        return full.reshape(self._divided(full.shape)).movedim(self.dim + 1, 0).reshape(-1)

    def full(self, counted: Tensor, shape: Sequence[int]) -> Tensor:
        """The full tensor of elements in slice order."""
        if self == MEMORY_ORDER:
            return counted.view(tuple(shape))
        divided = self._divided(shape)
        slices = divided.pop(self.dim + 1)
        return counted.view(slices, *divided).movedim(0, self.dim + 1).reshape(*shape)

    def piece(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The sizes of a piece of a full tensor."""
        if self == MEMORY_ORDER:
            return tuple(shape)
        before = (1,) * self.dim if self.packed > 1 else tuple(shape[: self.dim])
        return (*before, shape[self.dim] // (self.of * self.packed), *shape[self.dim + 1 :])

    def grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        """How pieces are counted: slices, the dimensions before, packed tensors."""
        return (self.of, *(shape[: self.dim] if self.packed > 1 else (1,) * self.dim), self.packed)

    def boxes(self, shape: Sequence[int], begin: int, end: int) -> Iterator[CountedBox]:
        """The boxes that make up an interval in slice order.

        Args:
            shape: Of the full tensor.
            begin: First element.
            end: One past the last element.
        """
        piece = self.piece(shape)
        each = max(1, math.prod(piece))
        for number in range(begin // each, -(-end // each)):
            origin, before = self._origin(shape, number), number * each
            first = max(begin, before)
            for offsets, sizes in boxes(piece, first - before, min(end - before, each)):
                yield CountedBox(first, (tuple(map(sum, zip(origin, offsets, strict=True))), sizes))
                first += math.prod(sizes)

    def around(self, shape: Sequence[int], box: Box) -> Box:
        """The smallest box around one of `boxes` that is an interval of the flattened tensor."""
        offsets, sizes = box
        if math.prod(sizes[: self.dim]) == 1:
            return box
        rest = shape[self.dim :]
        return (*offsets[: self.dim], *(0 for _ in rest)), (*sizes[: self.dim], *rest)

    def _divided(self, shape: Sequence[int]) -> list[int]:
        """The shape with the sliced dimension as three: packed tensors, slices, what a slice has of each."""
        width = shape[self.dim] // (self.of * self.packed)
        return [*shape[: self.dim], self.packed, self.of, width, *shape[self.dim + 1 :]]

    def _origin(self, shape: Sequence[int], number: int) -> tuple[int, ...]:
        """Where a piece begins in the full tensor."""
        if self == MEMORY_ORDER:
            return (0,) * len(shape)
        at = []
        for size in reversed(self.grid(shape)):
            number, place = divmod(number, size)
            at.append(place)
        part, *before, number = at
        width = shape[self.dim] // (self.of * self.packed)
        return (*reversed(before), (part * self.of + number) * width, *(0 for _ in shape[self.dim + 1 :]))


MEMORY_ORDER = SliceOrder()
