"""Who writes what of a tensor that several ranks hold parts of, or the same of."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["missing", "share"]

Interval = tuple[int, int]
"""From an element of the flattened tensor to one beyond the last."""


def share(held: Sequence[Interval], rank: int) -> Interval:
    """What one rank writes: its part of what it holds, divided between those that hold the same.

    Args:
        held: What each rank holds.
        rank: Which one.
    """
    start, end = held[rank]
    same = [who for who, theirs in enumerate(held) if theirs == (start, end)]
    place, length = same.index(rank), end - start
    return start + length * place // len(same), start + length * (place + 1) // len(same)


def missing(held: Sequence[Interval], numel: int) -> int | None:
    """The first element that nobody holds; None where all are there."""
    reached = 0
    for start, end in sorted(held):
        if start > reached:
            break
        reached = max(reached, end)
    return reached if reached < numel else None
