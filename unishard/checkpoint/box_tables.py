"""The boxes of many intervals of one tensor at once: `SliceOrder.boxes`, in arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unishard.distributed.slice_order import MEMORY_ORDER, SliceOrder

Numbers = NDArray[np.int64]


class BoxTable(NamedTuple):
    """A row for each box, in the order of the intervals."""

    source: Numbers
    """Which interval it belongs to."""
    first: Numbers
    """Its first element."""
    last: Numbers
    """One past its last element."""
    offsets: Numbers
    """In every dim: boxes x dims."""
    sizes: Numbers
    """In every dim: boxes x dims."""


def box_table(shape: Sequence[int], begins: Any, ends: Any, order: SliceOrder = MEMORY_ORDER) -> BoxTable:
    """The boxes that make up intervals of a tensor, as `SliceOrder.boxes` divides each of them.

    Args:
        shape: Of the full tensor, without empty dims.
        begins: First element of each interval.
        ends: One past the last element of each; larger than `begins`, and in the same piece.
        order: How the elements are counted.
    """
    begins, ends = np.asarray(begins, np.int64), np.asarray(ends, np.int64)
    if order == MEMORY_ORDER:
        return _in_memory_order(shape, begins, ends)
    piece = order.piece(shape)
    number = begins // math.prod(piece)
    before = number * math.prod(piece)
    table = _in_memory_order(piece, begins - before, ends - before)
    number, before = number[table.source], before[table.source]
    part, *others, packed = np.unravel_index(number, order.grid(shape))
    offsets = table.offsets
    for dim, index in enumerate(others):
        offsets[:, dim] += index
    offsets[:, order.dim] += (packed * order.of + part) * piece[order.dim]
    return BoxTable(table.source, table.first + before, table.last + before, offsets, table.sizes)


def _in_memory_order(shape: Sequence[int], begins: Numbers, ends: Numbers) -> BoxTable:
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
    nonempty = bounds[:, 1:] > bounds[:, :-1]
    source, step = np.nonzero(nonempty)
    first, last = bounds[:, :-1][nonempty], bounds[:, 1:][nonempty]
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
