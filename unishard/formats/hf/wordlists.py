"""Long lists of names, written as text."""

from __future__ import annotations

__all__ = ["names"]


def names(text: str) -> tuple[str, ...]:
    """The names in a text with blanks between them."""
    return tuple(text.split())
