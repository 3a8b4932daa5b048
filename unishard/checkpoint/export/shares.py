"""Divides the writing of a sharded or replicated tensor between ranks."""

from __future__ import annotations

from collections.abc import Sequence


def share(intervals: Sequence[range], rank: int) -> range:
    """The interval that one rank writes: its own, divided between the ranks that hold the same one.

    Args:
        intervals: The interval that each rank holds.
        rank: The rank that writes.
    """
    own = intervals[rank]
    same = [who for who, theirs in enumerate(intervals) if theirs == own]
    place = same.index(rank)
    return own[len(own) * place // len(same) : len(own) * (place + 1) // len(same)]


def missing(intervals: Sequence[range], numel: int) -> int | None:
    """The first element that no rank holds; None if all elements are held."""
    reached = 0
    for held in sorted(intervals, key=lambda each: each.start):
        if held.start > reached:
            break
        reached = max(reached, held.stop)
    return reached if reached < numel else None
