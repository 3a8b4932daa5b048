"""Lets an engine read arguments that stand under other names in a document, and puts what it says back at those names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from unishard.config.nested import Native, merge, nested
from unishard.formats.accelerate.keys import TOOL
from unishard.mapping.entries import Entry, Meaning, Path
from unishard.mapping.rules import Fit

__all__ = ["Arguments", "Spot", "block_of", "dropped", "overlooked", "refused"]


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a document says something."""

    path: Path
    value: Any
    assumed: bool = False
    """Whether it does not say it, and Accelerate assumes it."""
    fit: Fit = Fit.EXACT
    note: str = ""
    """How what Accelerate does differs from what the key says."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What it says beyond the arguments."""


@dataclass(slots=True)
class Arguments:
    """An engine's arguments, each with the place in the document that says it."""

    block: str
    """The key of the document that holds them."""
    names: Mapping[str, Path] = field(default_factory=dict)
    """Where below it the document would say an argument that it is silent about."""
    native: Native = field(default_factory=dict)
    spots: dict[str, Spot] = field(default_factory=dict)

    def add(self, key: str, value: Any, spot: Spot) -> None:
        """An argument by its dotted key. Several may have one spot."""
        self.native = merge(self.native, nested({key: value}))
        self.spots[key] = spot

    def placed(self, entries: Iterable[Entry]) -> list[Entry]:
        """What the engine says of them: one entry for each spot, and those of the engine's own defaults."""
        found: dict[Path, list[Entry]] = {spot.path: [] for spot in self.spots.values()}
        others = []
        for entry in entries:
            spot = self._spot(entry.path)
            if spot:
                found[spot.path].append(entry)
            else:
                others.append(entry.at(self.block, *self.names.get(entry.key, entry.path)))
        spots = {spot.path: spot for spot in self.spots.values()}
        return [*(_joined(spots[path], said) for path, said in found.items()), *others]

    def _spot(self, path: Path) -> Spot | None:
        above = (".".join(path[:length]) for length in range(len(path), 0, -1))
        return next((self.spots[key] for key in above if key in self.spots), None)


def _joined(spot: Spot, entries: Sequence[Entry]) -> Entry:
    """What several arguments say, as one key that stands for all of them."""
    meanings = [entry.meaning for entry in entries]
    telling = [meaning for meaning in meanings if meaning.fields or meaning.native or meaning.fit is Fit.UNSUPPORTED] or meanings
    said = [*telling, Meaning(spot.fit, spot.note, spot.fields)]
    worst = max((meaning.fit for meaning in said), key=lambda fit: fit.badness)
    joined = Meaning(
        worst,
        "; ".join(dict.fromkeys(meaning.note for meaning in said if meaning.note)),
        {key: value for meaning in said for key, value in meaning.fields.items()},
        {key: value for meaning in said for key, value in meaning.native.items()},
        kept=bool(meanings) and all(meaning.kept for meaning in meanings),
    )
    entry = Entry(spot.path, spot.value, joined, spot.assumed)
    return entry.but(worst, joined.note) if worst is Fit.UNSUPPORTED else entry


def dropped(path: Path, value: Any, why: str, *, kept: bool = True) -> Entry:
    """An entry that concerns nothing."""
    return Entry(path, value, Meaning(Fit.IGNORED, why, kept=kept))


def refused(path: Path, value: Any, why: str, *, assumed: bool = False) -> Entry:
    """An entry that cannot be had."""
    return Entry(path, value, Meaning(Fit.UNSUPPORTED, why), assumed)


def overlooked(path: Path, value: Any, names: Iterable[str]) -> Entry:
    """An entry for a key that Accelerate takes without a word and never looks at."""
    near = get_close_matches(path[-1], names, 1, 0.7)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return dropped(path, value, f"{TOOL} does not know this key and ignores it{hint}")


def block_of(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The mapping below a key; empty where there is none."""
    found = document.get(name)
    return found if isinstance(found, Mapping) else {}
