"""Entries that Accelerate's readers make themselves, and the blocks of a document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from unishard.contract.entries import Entry, KeyEffect, Path
from unishard.contract.rules import Fit
from unishard.formats.accelerate.keys import TOOL

__all__ = ["block_of", "dropped", "overlooked", "refused"]


def dropped(path: Path, value: Any, why: str, *, copy_verbatim: bool = True) -> Entry:
    """An entry that concerns nothing."""
    return Entry(path, value, KeyEffect(Fit.IGNORED, why, copy_verbatim=copy_verbatim))


def refused(path: Path, value: Any, why: str, *, assumed: bool = False) -> Entry:
    """An entry for what is not supported."""
    return Entry(path, value, KeyEffect(Fit.UNSUPPORTED, why), assumed)


def overlooked(path: Path, value: Any, names: Iterable[str]) -> Entry:
    """An entry for a key that Accelerate takes without a word and never looks at."""
    near = get_close_matches(path[-1], names, 1, 0.7)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return Entry(
        path,
        value,
        KeyEffect(Fit.IGNORED, f"{TOOL} does not know this key and ignores it{hint}", copy_verbatim=True, unknown=True),
    )


def block_of(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The mapping below a key; empty where there is none."""
    found = document.get(name)
    return found if isinstance(found, Mapping) else {}
