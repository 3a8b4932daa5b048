"""Where the chunks of a tensor lie in a checkpoint, found without looking at all of them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple


class Chunk(NamedTuple):
    """A box of a tensor as it is stored in a file."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    length: int


class SortedChunks:
    """The chunks of a tensor, in the order of their elements."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        """Sort them."""
        spans = sorted((*_span(chunk), chunk) for chunk in chunks)
        # Boxes of several dims may interleave in the flattened tensor: the largest end so far never falls.
        self._firsts, self._chunks = [first for first, *_ in spans], [chunk for *_, chunk in spans]
        self._ends = list(accumulate((last for _, last, _ in spans), max))

    def within(self, begin: int, end: int) -> Sequence[Chunk]:
        """Those that may hold elements of an interval of the flattened tensor."""
        return self._chunks[bisect_left(self._ends, begin) : bisect_left(self._firsts, end)]


def _span(chunk: Chunk) -> tuple[int, int]:
    """The first and the last element of a box in the flattened tensor."""
    strides = [math.prod(chunk.shape[dim + 1 :]) for dim in range(len(chunk.shape))]
    first = sum(offset * stride for offset, stride in zip(chunk.offsets, strides, strict=True))
    return first, first + sum(max(size - 1, 0) * stride for size, stride in zip(chunk.sizes, strides, strict=True))
