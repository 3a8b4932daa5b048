"""Where the chunks of a checkpoint's tensors lie, found without looking at all of them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch


class Chunk(NamedTuple):
    """A box of a tensor as it is stored in a file."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    length: int


class ChunkTable(Protocol):
    """The chunks of all tensors."""

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Of each tensor."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Of each tensor."""

    def chunks(self, name: str, begin: int, end: int) -> Iterator[Chunk]:
        """Those that may hold elements of an interval of the flattened tensor.

        Raises:
            CheckpointError: They lie outside the directory, or the table is damaged.
        """


class ListedChunks:
    """A table from lists, such as those of torch's index."""

    def __init__(
        self, listed: Mapping[str, Sequence[Chunk]], shapes: Mapping[str, torch.Size], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """Sort the chunks.

        Args:
            listed: The chunks of each tensor.
            shapes: Of each tensor.
            dtypes: Of each tensor.
        """
        self.shapes, self.dtypes = shapes, dtypes
        self._sorted: dict[str, tuple[list[Chunk], list[int], list[int]]] = {}
        self._listed = listed

    def chunks(self, name: str, begin: int, end: int) -> Iterator[Chunk]:
        """See `ChunkTable`."""
        if name not in self._sorted:
            spans = sorted((*_span(chunk), index) for index, chunk in enumerate(self._listed[name]))
            # Boxes of several dims may interleave in the flattened tensor: the largest end so far never falls.
            ends = list(accumulate((last for _, last, _ in spans), max))
            self._sorted[name] = (
                [self._listed[name][index] for *_, index in spans],
                [first for first, *_ in spans],
                ends,
            )
        chunks, firsts, ends = self._sorted[name]
        yield from chunks[bisect_left(ends, begin) : bisect_left(firsts, end)]


def _span(chunk: Chunk) -> tuple[int, int]:
    """The first and the last element of a box in the flattened tensor."""
    strides = [math.prod(chunk.shape[dim + 1 :]) for dim in range(len(chunk.shape))]
    first = sum(offset * stride for offset, stride in zip(chunk.offsets, strides, strict=True))
    return first, first + sum(max(size - 1, 0) * stride for size, stride in zip(chunk.sizes, strides, strict=True))
