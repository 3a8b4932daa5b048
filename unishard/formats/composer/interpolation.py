"""OmegaConf's `${variables.x}`: resolved where the file itself has the value (OmegaConf 2.3), left as it is
elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["named", "resolved"]

_NAME = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_DEEP = 16
"""Interpolations within interpolations that are followed; a circle ends here and stays text."""


def resolved(value: Any, root: Mapping[str, Any], depth: int = 0) -> Any:
    """A value with the interpolations in it replaced by what `root` holds."""
    if isinstance(value, Mapping):
        return {key: resolved(item, root, depth) for key, item in value.items()}
    if isinstance(value, list):
        return [resolved(item, root, depth) for item in value]
    if not isinstance(value, str) or depth > _DEEP:
        return value
    whole = _NAME.fullmatch(value)
    if whole:
        found = _at(root, whole.group(1))
        return value if found is None else resolved(found, root, depth + 1)
    return _NAME.sub(lambda match: _inline(match, root, depth), value)


def named(value: Any) -> set[str]:
    """The top-level keys that the interpolations in a value name."""
    if isinstance(value, Mapping):
        return {name for item in value.values() for name in named(item)}
    if isinstance(value, list):
        return {name for item in value for name in named(item)}
    return {name.partition(".")[0] for name in _NAME.findall(value)} if isinstance(value, str) else set()


def _inline(match: re.Match[str], root: Mapping[str, Any], depth: int) -> str:
    found = _at(root, match.group(1))
    whole = match.group()
    return whole if found is None or isinstance(found, Mapping | list) else str(resolved(found, root, depth + 1))


def _at(root: Mapping[str, Any], name: str) -> Any:
    value: Any = root
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value
