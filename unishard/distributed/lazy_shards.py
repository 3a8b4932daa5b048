"""A shard of a tensor to be stored, with a function that reads any range of it on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from unishard.distributed.boxes import Box, boxes, inside, overlap, runs, view_of
from unishard.distributed.shards import Shard, flat
from unishard.distributed.slice_order import MEMORY_ORDER, CountedBox, SliceOrder


class HeldPart(NamedTuple):
    """A box of a tensor that a rank or a file holds."""

    shape: tuple[int, ...]
    """Of the full tensor; one number where its elements are counted in memory order."""
    box: Box
    held: CountedBox
    """What has to be read for it."""

    def read(self, shard: LazyShard) -> Tensor:
        """Its elements, in its sizes."""
        return inside(shard.read(self.held.first, self.held.last), self.held.box, self.box)

    def view_in(self, row: Tensor, start: int) -> Tensor:
        """Its place in an interval of the flattened tensor that begins with an element."""
        return view_of(row, start, self.shape, self.box)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """As `boxes.runs`."""
        return runs(self.shape, *self.box)


class LazyShard(NamedTuple):
    """The interval of a tensor that a rank or a file holds. Nothing is read until `read` is called."""

    shape: torch.Size
    """Of the full tensor."""
    dtype: torch.dtype
    start: int
    """First element."""
    end: int
    """One past the last element; equal to `start` for an empty shard."""
    read: Callable[[int, int], Tensor]
    """Returns the elements between two of the full tensor, both within the shard: flat, contiguous, on any device."""
    order: SliceOrder = MEMORY_ORDER
    """How the elements are counted."""

    @property
    def interval(self) -> range:
        """The elements of the full tensor, in their order."""
        return range(self.start, self.end)

    def within(self, begin: int, end: int, own: range | None = None) -> Iterator[HeldPart]:
        """What it holds of an interval of the flattened full tensor.

        Args:
            begin: First element, in memory order.
            end: One past the last element.
            own: Only these elements, in its own order.
        """
        own = self.interval if own is None else own
        shape = tuple(self.shape)
        if self.order == MEMORY_ORDER:  # of which any interval is a box
            shape, own = (self.shape.numel(),), range(max(own.start, begin), min(own.stop, end))
        wanted = [*boxes(shape, begin, end)]
        for held in self.order.boxes(shape, own.start, own.stop):
            for box in wanted:
                if (common := overlap(held.box, box)) is not None:
                    yield HeldPart(shape, common, held)


def lazy_shard_of(part: Shard) -> LazyShard:
    """This rank's shard of a live tensor.

    Its memory is read when it is written to a file, not now, unless it is not contiguous.
    """
    values = flat(part.values)
    start, stop = part.interval.start, part.interval.stop
    return LazyShard(
        part.shape, values.dtype, start, stop, lambda begin, end: values[begin - start : end - start], part.order
    )
