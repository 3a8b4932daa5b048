"""Where the chunks of a tensor lie in a checkpoint, found without looking at all of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from unishard.distributed.boxes import span


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
        spans = sorted((*span(chunk.shape, (chunk.offsets, chunk.sizes)), chunk) for chunk in chunks)
        # Boxes of several dims may interleave in the flattened tensor: the largest end so far never falls.
        self._firsts, self._chunks = [first for first, *_ in spans], [chunk for *_, chunk in spans]
        self._ends = list(accumulate((last for _, last, _ in spans), max))

    def within(self, begin: int, end: int) -> Sequence[Chunk]:
        """Those that may hold elements of an interval of the flattened tensor."""
        return self._chunks[bisect_left(self._ends, begin) : bisect_left(self._firsts, end)]
