"""What observers read of the loop: where it is."""

from __future__ import annotations

from typing import Protocol


class Position(Protocol):
    """The place of the loop in its windows."""

    updates: int
    """Accumulation windows that have ended."""

    @property
    def begins_window(self) -> bool:
        """Whether the next forward is the first of its window."""
        ...
