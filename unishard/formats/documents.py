"""Writes documents as YAML, JSON and TOML. `source` reads them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from io import StringIO
from typing import Any

from ruamel.yaml import YAML

__all__ = ["inline_yaml", "json_text", "toml_text", "yaml_text"]

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def yaml_text(document: Any, *, old: bool = False, width: int = 140) -> str:
    """The YAML of a document.

    Args:
        document: Nested mappings, with ruamel's comments or without.
        old: Whether its tool reads YAML 1.1, as PyYAML does, where a bare `no` is false and `1e-5` is text.
        width: Columns after which text is folded.
    """
    yaml = YAML()
    yaml.width = width
    if old:
        yaml.version = (1, 1)
        yaml.representer.ignore_aliases = lambda data: True
    out = StringIO()
    yaml.dump(document, out)
    return out.getvalue().partition("---\n")[2] if old else out.getvalue()


def inline_yaml(value: Any) -> str:
    """The YAML of a value, behind a key on one line."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = True
    yaml.width = 2**16
    out = StringIO()
    yaml.dump({"value": value}, out)
    return out.getvalue().strip().removeprefix("{value: ").removesuffix("}")


def json_text(document: Mapping[str, Any]) -> str:
    """The JSON of a document, indented."""
    return json.dumps(document, indent=2) + "\n"


def toml_text(document: Mapping[str, Any]) -> str:
    """The TOML of a document, which the standard library reads but does not write.

    TOML has no null, so it is left out.
    """
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
            return (
                f"{{{', '.join(f'{_key(key)} = {_value(item)}' for key, item in value.items() if item is not None)}}}"
            )
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
