"""Converts intervals of a flattened tensor to boxes of the tensor, and back; what boxes have in common."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from torch import Tensor

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes in every dim."""


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """The boxes that make up an interval of the flattened tensor, in order.

    Each box is contiguous in the tensor. A matrix needs at most three (the rest of a row, full rows, the beginning of a
    row), and each further dim up to two more.

    Args:
        shape: Of the full tensor.
        start: First element, in row-major order.
        end: One past the last element.
    """
    if start >= end:
        return
    if len(shape) < 2:
        yield (start,) * len(shape), (end - start,) * len(shape)
        return
    row, rest = math.prod(shape[1:]), tuple(shape[1:])
    first, last = start // row, end // row
    if start % row:
        yield from _within(first, rest, start % row, min(row, end - first * row))
        first += 1
    if last > first:
        yield (first, *(0 for _ in rest)), (last - first, *rest)
    if end % row and last >= first:
        yield from _within(last, rest, 0, end % row)


def _within(index: int, rest: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """The boxes of an interval inside one row."""
    for offsets, sizes in boxes(rest, start, end):
        yield (index, *offsets), (1, *sizes)


def runs(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The contiguous runs of memory that make up a box of a tensor, in order.

    Yields:
        The run's offset in the flattened tensor, its offset in the flattened box, and its length.
    """
    if 0 in sizes:
        return
    full = len(shape)  # the first dim from which on all are taken in full
    while full and sizes[full - 1] == shape[full - 1]:
        full -= 1
    outer = max(full - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = math.prod(sizes[outer:])
    for count, index in enumerate(itertools.product(*(range(size) for size in sizes[:outer]))):
        begin = sum((offset + (index[dim] if dim < outer else 0)) * strides[dim] for dim, offset in enumerate(offsets))
        yield begin, count * length, length


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes of a tensor have in common; None if nothing."""
    offsets = tuple(map(max, zip(one[0], other[0], strict=True)))
    ends = [min(a + b, c + d) for a, b, c, d in zip(*one, *other, strict=True)]
    sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
    return (offsets, sizes) if min(sizes, default=1) > 0 else None


def inside(values: Tensor, box: Box, part: Box) -> Tensor:
    """A part of a box, as a view of the elements of the box in a row."""
    view = values.view(box[1])
    for dim, (begin, offset, size) in enumerate(zip(box[0], *part, strict=True)):
        view = view.narrow(dim, offset - begin, size)
    return view


def span(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """The first and the last element of a box in the flattened tensor."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(box[0], strides, strict=True))
    return first, first + sum(max(size - 1, 0) * stride for size, stride in zip(box[1], strides, strict=True))


def view_of(row: Tensor, start: int, shape: Sequence[int], box: Box) -> Tensor:
    """A box of a tensor, as a view of an interval of its flattened elements.

    Args:
        row: The interval.
        start: Its first element.
        shape: Of the tensor.
        box: Within the interval.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first, _ = span(shape, box)
    return row.as_strided(box[1], strides, row.storage_offset() + first - start)
