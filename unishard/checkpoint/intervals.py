"""Converts intervals of a flattened tensor to boxes of the tensor, and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

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
