"""Long lists of keys, written as text."""

from __future__ import annotations

from collections.abc import Mapping

from unishard.contract.entries import Key
from unishard.contract.key_rows import drops

__all__ = ["ignored", "names"]


def names(text: str) -> tuple[str, ...]:
    """The names in a text with blanks between them."""
    return tuple(text.split())


def ignored(groups: Mapping[str, str]) -> dict[str, Key]:
    """Rows of keys that are left out: the names of each group by its reason."""
    return {name: drops(why) for why, text in groups.items() for name in names(text)}
