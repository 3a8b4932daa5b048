"""Tables and keys that torchtitan's JobConfig does not have: a model's own, which its experiments and forks add."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from unishard.contract.entries import Entry, Key, KeyEffect
from unishard.contract.key_rows import drops
from unishard.contract.rules import Fit
from unishard.formats.torchtitan.keys import KEYS

__all__ = ["of_a_fork", "own_of"]

_TABLES = frozenset(key.partition(".")[0] for key in KEYS)
_FORK = (
    "not a key of torchtitan 0.2: only a fork that adds it reads it; what it does to the training is not carried over"
)
_ROW = drops("not a table of JobConfig: only the module that adds it reads it", unknown=True)


def own_of(data: Mapping[str, Any]) -> Mapping[str, Key]:
    """Rows for unknown tables, except those that only misspell a known one."""
    strange = [
        name
        for name, value in data.items()
        if isinstance(value, Mapping) and value and name not in _TABLES and "." not in name
    ]
    return {name: _ROW for name in strange if not get_close_matches(name, _TABLES, 1, 0.75)}


def of_a_fork(entry: Entry, known: Iterable[str]) -> Entry:
    """The entry; an unknown key in a table of JobConfig is reported unless it misspells a known one: a fork reads
    it.
    """
    refused = (
        entry.effect.fit is Fit.UNSUPPORTED
        and entry.effect.unknown
        and len(entry.path) > 1
        and entry.path[0] in _TABLES
    )
    if not refused or "did you mean" in entry.effect.note or get_close_matches(entry.key, known, 1, 0.9):
        return entry
    return entry._replace(effect=KeyEffect(Fit.APPROXIMATE, _FORK, unknown=True, copy_verbatim=True, notable=True))
