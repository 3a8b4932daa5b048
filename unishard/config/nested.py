"""Nested settings and their dotted keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Native = dict[str, Any]
"""An engine's own config, or a document of another tool: nested dicts."""


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Native:
    """A new nested dict: `base` with `over` on top, dicts merged key by key, everything else replaced."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def flat(native: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a nested native config, each with its dotted key."""
    for key, value in native.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def is_within(path: str, paths: Iterable[str]) -> bool:
    """Whether a dotted path is one of these, or lies below one."""
    return any(path == other or path.startswith(f"{other}.") for other in paths)


def nested(settings: Mapping[str, Any]) -> Native:
    """Dotted keys as nested dicts, the inverse of `flat`."""
    native: Native = {}
    for key, value in settings.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        native = merge(native, value)
    return native
