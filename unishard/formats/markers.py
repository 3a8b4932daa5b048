"""The markers by which a document's format is recognized."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from unishard.contract.entries import Entry, Path


class Markers(NamedTuple):
    """What speaks for one format."""

    keys: Mapping[str, int]
    """Dotted keys, and the weight of each. A key that several tools have says little."""
    more: Callable[[Mapping[str, Any]], int] = lambda data: 0
    """What a document as a whole adds to their sum."""

    def weight(self, data: Mapping[str, Any]) -> int:
        """How much a document speaks for the format; 0 for not at all."""
        return sum(weight for key, weight in self.keys.items() if has(data, key)) + self.more(data)

    def present(self, data: Mapping[str, Any]) -> list[str]:
        """The keys of a document that speak for the format, the heaviest first."""
        return sorted((key for key in self.keys if has(data, key)), key=lambda key: -self.keys[key])


def beside(around: Markers, own: Mapping[str, int], least: int = 3) -> Callable[[Mapping[str, Any]], int]:
    """For a tool that adds its own keys to another's: the other's weight counts for it too where its own say enough."""
    return lambda data: around.weight(data) if Markers(own).weight(data) >= least else 0


def has(data: Any, key: str) -> bool:
    """Whether a document has a dotted key."""
    for name in key.split("."):
        if not isinstance(data, Mapping) or name not in data:
            return False
        data = data[name]
    return True


def weighted(keys: Mapping[int, str]) -> dict[str, int]:
    """Markers by weight, each a text of keys with blanks between them."""
    return {key: weight for weight, text in keys.items() for key in text.split()}


_LOUD, _CLEAR = 3, 2


class Coverage(NamedTuple):
    """What of a document a format knows."""

    share: float
    """Of its keys, or of those at the top where that is less."""
    unknown: tuple[str, ...] = ()
    """The keys that the tool does not have."""

    @property
    def most(self) -> bool:
        """Whether most of the keys are known, so that the document may be the tool's."""
        return self.share >= 0.5


def by_entries(entries: Iterable[Entry]) -> Coverage:
    """What a reading knows of the keys that the document has."""
    known: dict[Path, bool] = {}
    for entry in entries:
        if not entry.assumed:
            known[entry.path] = not entry.effect.unknown
    unknown = tuple(".".join(path) for path, is_known in known.items() if not is_known)
    return Coverage(_share(known), unknown)


def by_markers(keys: Mapping[str, int], data: Mapping[str, Any]) -> Coverage:
    """What the keys that speak for a format hold of a document, if one speaks loudly, without the format's tables."""
    if not any(weight >= _LOUD and has(data, key) for key, weight in keys.items()):
        return Coverage(0.0)
    loud = {tuple(key.split(".")) for key, weight in keys.items() if weight >= _CLEAR}
    return Coverage(
        _share({path: any(path[:length] in loud for length in range(1, len(path) + 1)) for path in _leaves(data)})
    )


def _share(known: Mapping[Path, bool]) -> float:
    tops: dict[str, bool] = {}
    for path, is_known in known.items():
        if path:
            tops[path[0]] = tops.get(path[0], False) or is_known
    return min((sum(found.values()) / len(found) for found in (known, tops) if found), default=1.0)


def _leaves(data: Mapping[str, Any], above: Path = ()) -> Iterator[Path]:
    for name, value in data.items():
        path = (*above, str(name))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        else:
            yield path
