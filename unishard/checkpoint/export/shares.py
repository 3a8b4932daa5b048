"""Divides the writing of a sharded or replicated tensor between ranks."""

from __future__ import annotations

from collections.abc import Sequence

Interval = tuple[int, int]
"""First element in the flattened tensor, and one past the last."""


def share(intervals: Sequence[Interval], rank: int) -> Interval:
    """The interval that one rank writes: its own, divided between the ranks that hold the same one.

    Args:
        intervals: The interval that each rank holds.
        rank: The rank that writes.
    """
    start, end = intervals[rank]
    same = [who for who, theirs in enumerate(intervals) if theirs == (start, end)]
    place, length = same.index(rank), end - start
    return start + length * place // len(same), start + length * (place + 1) // len(same)


def missing(intervals: Sequence[Interval], numel: int) -> int | None:
    """The first element that no rank holds; None if all elements are held."""
    reached = 0
    for start, end in sorted(intervals):
        if start > reached:
            break
        reached = max(reached, end)
    return reached if reached < numel else None
