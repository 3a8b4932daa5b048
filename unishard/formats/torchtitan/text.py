"""TOML of two levels, which is all that torchtitan has: tables of plain values. The standard library reads TOML but writes none."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["toml_of"]

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml_of(document: Mapping[str, Any]) -> str:
    """The text of a document; null has no word in TOML and is left out."""
    return "\n".join(_table(document, ())).strip("\n") + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Its own values first, then the tables below it, as TOML demands."""
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping) and value is not None}
    if path and (plain or not table):
        yield f"\n[{'.'.join(map(_key, path))}]"
    for key, value in plain.items():
        yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _table(value, (*path, str(key)))


def _key(key: Any) -> str:
    return str(key) if _BARE.fullmatch(str(key)) else _quoted(str(key))


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return _number(value)
        case int():
            return str(value)
        case Mapping():
            return f"{{{', '.join(f'{_key(key)} = {_value(item)}' for key, item in value.items() if item is not None)}}}"
        case list() | tuple():
            return f"[{', '.join(_value(item) for item in value if item is not None)}]"
    return _quoted(str(value))


def _number(value: float) -> str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    text = repr(value)
    return text if "." in text or "e" not in text else text.replace("e", ".0e")


def _quoted(text: str) -> str:
    """A basic string, whose escapes are JSON's; TOML also forbids the character 7F."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
