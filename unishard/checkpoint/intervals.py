"""Converts intervals of a flattened tensor to boxes of the tensor, and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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


# -- The boxes of many intervals of one tensor at once: `intervals.boxes`, in arrays ---------------

Numbers = NDArray[np.int64]


class BoxTable(NamedTuple):
    """A row for each box, in the order of the intervals."""

    source: Numbers
    """Which interval it belongs to."""
    first: Numbers
    """Its first element, in the flattened tensor."""
    last: Numbers
    """One past its last element."""
    offsets: Numbers
    """In every dim: boxes x dims."""
    sizes: Numbers
    """In every dim: boxes x dims."""


def box_table(shape: Sequence[int], begins: Any, ends: Any) -> BoxTable:
    """The boxes that make up intervals of the flattened tensor, as `intervals.boxes` divides each of them.

    Args:
        shape: Of the full tensor, without empty dims.
        begins: First element of each interval.
        ends: One past the last element of each; larger than `begins`.
    """
    begins, ends = np.asarray(begins, np.int64), np.asarray(ends, np.int64)
    blocks = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]  # elements of one index of a dim
    # Up: to the end of a row, of a matrix, ... as far as the interval reaches; then down again.
    points, levels = [begins], list(range(len(shape) - 1, 0, -1))
    for level in levels:
        above = -(-points[-1] // blocks[level - 1]) * blocks[level - 1]
        points.append(np.where(above <= ends, above, points[-1]))
    for level in reversed(levels):
        points.append(np.maximum(points[-1], ends // blocks[level - 1] * blocks[level - 1]))
    points.append(ends)
    bounds = np.stack(points, axis=1)
    held = bounds[:, 1:] > bounds[:, :-1]
    source, step = np.nonzero(held)
    first, last = bounds[:, :-1][held], bounds[:, 1:][held]
    dims = np.array([*levels, 0, *reversed(levels)], np.int64)[
        step
    ]  # in which dim a box has more than one index and not all
    return BoxTable(source, first, last, *_coordinates(shape, blocks, first, last, dims))


def _coordinates(
    shape: Sequence[int], blocks: Sequence[int], first: Numbers, last: Numbers, dims: Numbers
) -> tuple[Numbers, Numbers]:
    offsets, sizes = np.empty((len(first), len(shape)), np.int64), np.empty((len(first), len(shape)), np.int64)
    for dim, (length, block) in enumerate(zip(shape, blocks, strict=True)):
        offsets[:, dim] = first // block % length
        sizes[:, dim] = np.where(dims > dim, 1, np.where(dims == dim, (last - first) // block, length))
    return offsets, sizes
