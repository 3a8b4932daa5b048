"""Stretches of a flattened tensor as boxes of the tensor itself, and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

__all__ = ["Box", "boxes", "runs"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes in every dim."""


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """The boxes that a stretch of the flattened tensor consists of, in its order.

    Each is one run of memory in the tensor. A matrix needs three at most: the rest of a row, whole rows, the beginning of a row;
    each further dim up to two more.

    Args:
        shape: Of the whole tensor.
        start: First element, in row-major order.
        end: One beyond the last element.
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
    """Of a stretch inside one row."""
    for offsets, sizes in boxes(rest, start, end):
        yield (index, *offsets), (1, *sizes)


def runs(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The runs of memory that a box of a tensor consists of, in its order.

    Yields:
        Where the run begins in the flattened tensor, where it begins in the flattened box, and its length.
    """
    if 0 in sizes:
        return
    whole = len(shape)  # dims from here on are taken in full
    while whole and sizes[whole - 1] == shape[whole - 1]:
        whole -= 1
    outer = max(whole - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = math.prod(sizes[outer:])
    for count, index in enumerate(itertools.product(*(range(size) for size in sizes[:outer]))):
        begin = sum((offset + (index[dim] if dim < outer else 0)) * strides[dim] for dim, offset in enumerate(offsets))
        yield begin, count * length, length
