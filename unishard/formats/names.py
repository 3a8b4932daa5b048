"""Long lists of keys, written as text."""

from __future__ import annotations

from pathlib import Path

from unishard.contract.entries import Key
from unishard.contract.key_rows import drops

__all__ = ["NO_LOGS", "ignored", "names"]

NO_LOGS = "affects only logs; write your own logging section"
"""The note of keys about logs and profiles, which `logging` and `profile` say in other words."""


def names(text: str) -> tuple[str, ...]:
    """The names in a text with blanks between them."""
    return tuple(text.split())


def ignored(file: str) -> dict[str, Key]:
    """Rows of keys that are left out, from a list in a format's folder: a reason, and below it, indented, their
    names.
    """
    rows: dict[str, Key] = {}
    why = ""
    for line in (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines():
        if line[:1].isspace():
            rows |= dict.fromkeys(names(line), drops(why))
        else:
            why = line
    return rows
