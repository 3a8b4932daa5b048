"""Hands the part of a document that speaks of an engine to the engine's own table, and puts what it says back where the
document has it.

A format that wraps an engine's arguments knows that engine by name; the rest of the core does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from unishard.config.nested import Native, merge, nested
from unishard.config.topology import Topology
from unishard.contract import registry
from unishard.contract.entries import Entry, KeyEffect, Path
from unishard.contract.rules import Fit, worst


class SourceKey(NamedTuple):
    """A key of a document that says an argument of an engine, with what it says."""

    path: Path
    value: Any
    assumed: bool = False
    """Whether the document does not say it, and its tool assumes it."""
    fit: Fit = Fit.EXACT
    note: str = ""
    """How what the tool does differs from what the key says."""
    fields: Mapping[str, Any] = {}
    """What it says beyond the arguments."""
    notable: bool = False
    """Whether the default report has a line for it also where it is assumed."""


@dataclass(slots=True)
class EngineBlock:
    """An engine's arguments, each with the places in the document that say it."""

    engine: str
    base: Path
    """Where the document would say an argument that it is silent about."""
    names: Mapping[str, Path] = field(default_factory=dict)
    """Under which names, by dotted argument, if others than the engine's."""
    native: Native = field(default_factory=dict)
    source_keys: dict[str, tuple[SourceKey, ...]] = field(default_factory=dict)

    def add(self, key: str, value: Any, *source_keys: SourceKey) -> None:
        """An argument by its dotted key. Some share a key of the document; without one, nothing is said of it."""
        self.native = merge(self.native, nested({key: value}))
        self.source_keys[key] = source_keys

    def entries(self, *, defaults: Mapping[str, Any] | None = None, topology: Topology | None = None) -> list[Entry]:
        """What the arguments say, one entry for each key of the document, and one for each default that must be said.

        Args:
            defaults: What the tool assumes where it is silent, by dotted key.
            topology: The ranks, where they are known.
        """
        return self.placed(self.parsed(defaults=defaults, topology=topology))

    def parsed(self, *, defaults: Mapping[str, Any] | None = None, topology: Topology | None = None) -> list[Entry]:
        """What the engine says of its arguments, under its own names."""
        return registry.arguments(self.engine).read(self.native, defaults=defaults, topology=topology)

    def placed(self, entries: Iterable[Entry]) -> list[Entry]:
        """The engine's entries at the places of the document."""
        effects: dict[Path, list[KeyEffect]] = {}
        source_keys: dict[Path, SourceKey] = {}
        unusual: set[Path] = set()
        for entry in entries:
            places = self._source_keys(entry)
            effect = entry.effect
            if places and entry.assumed and not (effect.fields or effect.native or effect.fit is Fit.UNSUPPORTED):
                continue  # a default of the engine beside what is said, which decides nothing
            if places is None:
                places = (SourceKey((*self.base, *self.names.get(entry.key, entry.path)), entry.value, entry.assumed),)
            for source_key in places:
                source_keys.setdefault(source_key.path, source_key)
                effects.setdefault(source_key.path, []).append(effect)
                unusual |= set() if entry.usual else {source_key.path}
        placed = (combined(source_keys[path], meanings) for path, meanings in effects.items())
        return [entry._replace(usual=entry.path not in unusual) for entry in placed]

    def _source_keys(self, entry: Entry) -> tuple[SourceKey, ...] | None:
        above = (".".join(entry.path[:length]) for length in range(len(entry.path), 0, -1))
        own = next((self.source_keys[key] for key in above if key in self.source_keys), None)
        if own is not None:
            return own
        # The engine has one row for a whole block, such as `activation_checkpointing`.
        below = (source_keys for key, source_keys in self.source_keys.items() if key.startswith(f"{entry.key}."))
        return tuple(source_key for source_keys in below for source_key in source_keys) or None


def combined(source_key: SourceKey, meanings: Iterable[KeyEffect]) -> Entry:
    """One entry for what several arguments say at one key of a document.

    Args:
        source_key: The key.
        meanings: What they say. The worst fit counts, with its notes; what is only left out does not, beside what says
            something.
    """
    effects = list(meanings)
    telling = [one for one in effects if one.fields or one.native or one.fit is not Fit.IGNORED] or effects
    all_effects = [*telling, KeyEffect(source_key.fit, source_key.note, source_key.fields)]
    fit = worst(*(one.fit for one in all_effects))
    notes = dict.fromkeys(one.note for one in all_effects if one.note and one.fit is fit)
    fields = {name: value for one in all_effects for name, value in one.fields.items()}
    native = {name: value for one in all_effects for name, value in one.native.items()}
    kept = bool(effects) and all(one.copy_verbatim for one in effects)
    unknown, notable = (
        bool(effects) and all(one.unknown for one in effects),
        source_key.notable or any(one.notable for one in effects),
    )
    elsewhere = {name: value for one in all_effects for name, value in one.if_other_engine.items()}
    decides: tuple[str, ...] = ()
    if fit is Fit.UNSUPPORTED:
        decides = tuple(dict.fromkeys(name for one in all_effects for name in (*one.decides, *one.fields)))
        fields, native, elsewhere = {}, {}, {}
    stale = any(one.rejected_upstream for one in effects)
    effect = KeyEffect(fit, "; ".join(notes), fields, native, kept, elsewhere, unknown, notable, decides, stale)
    return Entry(source_key.path, source_key.value, effect, source_key.assumed)
