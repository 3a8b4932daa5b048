"""The signs by which a document's format is recognized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ["Signs", "beside", "has", "weighted"]


class Signs(NamedTuple):
    """What speaks for one format."""

    keys: Mapping[str, int]
    """Dotted keys, and the weight of each. A key that several tools have says little."""
    more: Callable[[Mapping[str, Any]], int] = lambda data: 0
    """What a document as a whole adds to their sum."""

    def weight(self, data: Mapping[str, Any]) -> int:
        """How much a document speaks for the format; 0 for not at all."""
        return sum(weight for key, weight in self.keys.items() if has(data, key)) + self.more(data)

    def found(self, data: Mapping[str, Any]) -> list[str]:
        """The keys of a document that speak for the format, the heaviest first."""
        return sorted((key for key in self.keys if has(data, key)), key=lambda key: -self.keys[key])


def beside(around: Signs, own: Mapping[str, int], least: int = 3) -> Callable[[Mapping[str, Any]], int]:
    """For a tool that adds its own keys to another's: the other's weight counts for it too where a key of its own says
    enough.
    """
    return lambda data: (
        around.weight(data) if any(weight >= least and has(data, key) for key, weight in own.items()) else 0
    )


def has(data: Any, key: str) -> bool:
    """Whether a document has a dotted key."""
    for name in key.split("."):
        if not isinstance(data, Mapping) or name not in data:
            return False
        data = data[name]
    return True


def weighted(keys: Mapping[int, str]) -> dict[str, int]:
    """Signs by weight, each a text of keys with blanks between them."""
    return {key: weight for weight, text in keys.items() for key in text.split()}
