"""How much of a document a format explains: what it is recognized by, beside the signs that speak for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from unishard.contract.entries import Entry, Path
from unishard.formats.signs import has

__all__ = ["Explained", "by_entries", "by_signs"]

_LOUD, _CLEAR = 3, 2


class Explained(NamedTuple):
    """What of a document a format knows."""

    share: float
    """Of its keys, or of those at the top where that is less."""
    unknown: tuple[str, ...] = ()
    """The keys that the tool does not have."""

    @property
    def most(self) -> bool:
        """Whether most of the keys are known, so that the document may be the tool's."""
        return self.share >= 0.5


def by_entries(entries: Iterable[Entry]) -> Explained:
    """What a reading knows of the keys that the document has."""
    known: dict[Path, bool] = {}
    for entry in entries:
        if not entry.assumed:
            known[entry.path] = not entry.effect.unknown
    unknown = tuple(".".join(path) for path, is_known in known.items() if not is_known)
    return Explained(_share(known), unknown)


def by_signs(keys: Mapping[str, int], data: Mapping[str, Any]) -> Explained:
    """What the keys that speak for a format hold of a document, if one speaks loudly, without the format's tables."""
    if not any(weight >= _LOUD and has(data, key) for key, weight in keys.items()):
        return Explained(0.0)
    loud = {tuple(key.split(".")) for key, weight in keys.items() if weight >= _CLEAR}
    return Explained(
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
