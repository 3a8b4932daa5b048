"""Tables that torchtitan's JobConfig does not have: a model's own, which its experiments and forks add."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from unishard.formats.torchtitan.keys import KEYS
from unishard.mapping.entries import Key
from unishard.mapping.key_rows import drops

__all__ = ["own_of"]

_TABLES = frozenset(key.partition(".")[0] for key in KEYS)
_ROW = drops("not a table of JobConfig: only the module that adds it reads it", unknown=True)


def own_of(data: Mapping[str, Any]) -> Mapping[str, Key]:
    """Rows for unknown tables, except those that only misspell a known one."""
    strange = [name for name, value in data.items() if isinstance(value, Mapping) and value and name not in _TABLES and "." not in name]
    return {name: _ROW for name in strange if not get_close_matches(name, _TABLES, 1, 0.75)}
