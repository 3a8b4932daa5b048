"""Long lists of keys, written as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from unishard.contract.entries import Key
from unishard.contract.key_rows import beyond_fields, drops, refuses

T = TypeVar("T")


def names(text: str) -> tuple[str, ...]:
    """The names in a text with blanks between them."""
    return tuple(text.split())


def each(text: str, value: T) -> dict[str, T]:
    """The same value for each name in a text."""
    return dict.fromkeys(names(text), value)


def ignored(file: str, row: Callable[[str], Key] = drops, off: Callable[[Any], bool] | None = None) -> dict[str, Key]:
    """Rows of keys that are left out, from a list in a format's folder: a reason, and below it, indented, their
    names. Those below a reason that begins with "refused: " are not supported, and those below "script: " are
    what the training script follows.

    Args:
        file: The list.
        row: Makes the row of what is left out from its reason.
        off: Whether a value switches off what is not supported.
    """
    rows: dict[str, Key] = {}
    why = ""
    for line in (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines():
        if line[:1].isspace():
            kind, _, reason = why.partition(": ")
            match kind:
                case "refused":
                    rows |= each(line, refuses(reason, off))
                case "script":
                    rows |= each(line, beyond_fields(row(reason)))
                case _:
                    rows |= each(line, row(why))
        else:
            why = line
    return rows
