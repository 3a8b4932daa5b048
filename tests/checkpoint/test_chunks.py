"""The chunks that hold some elements of a tensor are searched, and not scanned."""

from __future__ import annotations

import random
from collections.abc import Iterator

from unishard.checkpoint.chunks import Chunk, SortedChunks


def test_as_many_are_found_as_overlap() -> None:
    """Of boxes that interleave in the flattened tensor too."""
    boxes = [
        Chunk("x", (64, 64), (row, column), (8, 16), "f", 0, 0)
        for row in range(0, 64, 8)
        for column in range(0, 64, 16)
    ]
    chunks = SortedChunks(random.Random(0).sample(boxes, len(boxes)))
    for begin in range(0, 4096, 97):
        found = set(chunks.within(begin, begin + 50))
        needed = {box for box in boxes if any(begin <= at < begin + 50 for at in _elements(box))}
        assert needed <= found
        assert len(found) <= 8


def _elements(box: Chunk) -> Iterator[int]:
    (row, column), (rows, columns) = box.offsets, box.sizes
    return (64 * (row + down) + column + across for down in range(rows) for across in range(columns))
