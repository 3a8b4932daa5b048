"""Older shapes of a training YAML, seen as today's, and each entry put back where the file has it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from unishard.contract.entries import Entry, Path
from unishard.formats.engine_block import Spot, combined

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


def current_keys(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[Path, Path]]:
    """The file in today's shape, and where what was moved came from: prefix by prefix."""
    shaped: dict[str, Any] = dict(data)
    places: dict[Path, Path] = {}
    parallel = shaped.get("parallelism_config")
    if isinstance(parallel, Mapping) and isinstance(parallel.get("fsdp"), Mapping) and "fsdp_config" not in shaped:
        rest = dict(shaped.pop("parallelism_config"))
        shaped["fsdp_config"] = rest.pop("fsdp")
        places[("fsdp_config",)] = ("parallelism_config", "fsdp")
        if rest:
            shaped["parallelism_config"] = rest
    for old, new in (
        ("optimizers", "optimizer"),
        ("schedulers", "scheduler"),
        ("optimizer", "optimizer"),
        ("scheduler", "scheduler"),
    ):
        _unwrap(shaped, places, old, new)
    return shaped, places


def _unwrap(shaped: dict[str, Any], places: dict[Path, Path], old: str, new: str) -> None:
    """`optimizers: {decoupled_adamw: {...}}` and `schedulers: [{name: {...}}]` as a mapping with a name."""
    value = shaped.get(old)
    single = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(single, Mapping) or len(single) != 1 or (old != new and new in shaped):
        return
    ((name, settings),) = single.items()
    if not isinstance(settings, Mapping):
        return
    at: Path = (old, "0", str(name)) if isinstance(value, list) else (old, str(name))
    shaped.pop(old)
    shaped[new] = {"name": name, **settings}
    places[(new, "name")] = at
    places[(new,)] = at


def placed(entry: Entry, written: Mapping[str, Any], places: Mapping[Path, Path]) -> Entry:
    """The entry at the place where the file has it, with the value as it stands there."""
    path = entry.path
    if path in places:
        path = places[path]
    elif path[:1] in places:
        path = (*places[path[:1]], *path[1:])
    value: Any = written
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    shown = entry.value if value is None or entry.assumed or entry.path in places else value
    return Entry(path, shown, entry.effect, entry.assumed)


def together(entries: list[Entry], written: Mapping[str, Any]) -> list[Entry]:
    """One entry for each list, such as the older `schedulers`, since a list is one value."""
    lists = {
        name: [entry for entry in entries if entry.path[0] == name and entry.path[1:] and not entry.assumed]
        for name in written
    }
    for name, parts in lists.items():
        if parts and isinstance(written[name], list):
            entries = [
                combined(Spot((name,), written[name]), [part.effect for part in parts]),
                *(entry for entry in entries if entry not in parts),
            ]
    return entries
