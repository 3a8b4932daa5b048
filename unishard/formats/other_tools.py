"""Tools whose configs unishard does not read, and the markers by which each is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from unishard.formats.markers import Markers, weighted

_ENOUGH = 4


class OtherTool(NamedTuple):
    """A tool whose configs unishard does not read."""

    name: str
    markers: Markers
    """The weights of its keys; those of at least 2 are in no format that unishard reads. `-` counts as `_`."""
    modules: tuple[str, ...] = ()
    """Python modules whose classes only its files name."""
    points_to: Mapping[str, str] = {}
    """Keys under which its files have an engine's config, and how that is translated; `{}` stands for what the key
    names."""
    otherwise: str = ""
    """What to do with a file that has none of those keys."""

    def instead(self, data: Mapping[str, Any]) -> str:
        """What to do with a document."""
        for key, advice in self.points_to.items():
            if value := data.get(key):
                return advice.replace("{}", value if isinstance(value, str) else key)
        return self.otherwise


@cache
def tools() -> tuple[OtherTool, ...]:
    """Those named, the first of two that a document speaks for as much."""
    listed = json.loads((Path(__file__).parent / "other_tools.json").read_text(encoding="utf-8"))
    return tuple(
        OtherTool(
            one["name"],
            Markers(
                weighted({int(weight): keys for weight, keys in one["keys"].items()}),
                *([_unless(one["never"])] if "never" in one else []),
            ),
            tuple(one.get("modules", ())),
            one.get("points_to", {}),
            one.get("instead", "run `unishard init`"),
        )
        for one in listed
    )


def _unless(key: str) -> Callable[[Mapping[str, Any]], int]:
    """For a tool whose keys scripts of another one have too, beside a key that its own files never have."""
    return lambda data: -100 * (key in data)


def named(data: Mapping[str, Any]) -> tuple[OtherTool, list[str]] | None:
    """The tool that a document speaks for, and the keys by which it is known; None if that is none of them."""
    plain = {str(key).replace("-", "_"): value for key, value in data.items()}
    classes = list(_classes(data))
    weights = [tool.markers.weight(plain) + _ENOUGH * _names(tool, classes) for tool in tools()]
    most = max(weights)
    if most < _ENOUGH:
        return None
    tool = tools()[weights.index(most)]
    return tool, [*tool.markers.present(plain)[:3], *(name for name in classes if name.startswith(tool.modules))][:3]


def _names(tool: OtherTool, classes: list[str]) -> bool:
    return bool(tool.modules) and any(name.startswith(tool.modules) for name in classes)


def _classes(value: Any) -> Iterator[str]:
    """The classes that a document names."""
    match value:
        case Mapping():
            for key, item in value.items():
                if key in ("_target_", "_component_", "_recipe_", "class_path", "recipe") and isinstance(item, str):
                    yield item
                yield from _classes(item)
        case list():
            for item in value:
                yield from _classes(item)
