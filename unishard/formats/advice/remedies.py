"""From a refused translation to one that is written: which keys to drop, and which fields to set instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from unishard.config.topology import Topology
from unishard.contract.rules import Fit
from unishard.errors import ConfigError
from unishard.formats.advice.checking import check
from unishard.formats.files.source import Source
from unishard.formats.translating import Outcome, translate

_INSTEAD: Mapping[str, tuple[str, ...]] = {
    "optimizer.name": ("adamw",),
    "offload.params": ("cpu", "none"),
    "offload.optimizer": ("cpu", "none"),
    "backend": ("fsdp", "deepspeed"),
    "sharding.strategy": ("full_shard",),
}
"""Of a refused value of these fields, what people choose instead, the nearest first."""
_TARGETS = ("backend", "sharding.strategy")
"""Of these, those that are chosen for the target; where the source is unreadable, they are unknown."""
_MOST_ROUNDS = 30

_RefusedKey = tuple[str, tuple[str, ...]]
"""A key, or nothing for an override, and the fields that it decides."""


def remedy(
    source: Source,
    to: str,
    *,
    from_: str | None = None,
    overrides: Iterable[str] = (),
    topology: Topology | None = None,
    drop: Iterable[str] = (),
    with_: str | Path | None = None,
    only_drop: bool = False,
) -> Outcome | None:
    """Find what to drop and to set so that nothing is refused. Every proposal has been tried.

    Args:
        source: The document.
        to: Name of the format to write.
        from_: Name of the source's format; left out, it is recognised.
        overrides: As for `translate`.
        topology: As for `translate`.
        drop: As for `translate`.
        with_: As for `translate`.
        only_drop: Whether to set nothing.

    Returns:
        The translation in which nothing is refused, with what it drops and sets beyond what was asked for behind that;
        None if there is none, because something else than a key of the document is refused.
    """
    asked, unwanted = tuple(overrides), tuple(drop)

    def attempt(search: _Search) -> Outcome:
        chosen, left_out = (*asked, *search.overrides), (*unwanted, *search.drops)
        return translate(source, to, from_=from_, overrides=chosen, topology=topology, drop=left_out, with_=with_)

    search = _Search(only_drop=only_drop)
    for _ in range(_MOST_ROUNDS):
        try:
            outcome = attempt(search)
        except ConfigError:
            if not search.sets:
                return None
            search = _Search(only_drop=True)  # what is set does not go together with the rest of the file
            continue
        if all(item.assumed for item in outcome.items):
            return None  # nothing of the document is left
        refused = list(_refused(outcome, topology))
        if not refused:
            return _least(search, outcome, attempt, topology)
        if not search.improve(refused):
            return None
    return None


def _least(
    search: _Search, outcome: Outcome, attempt: Callable[[_Search], Outcome], topology: Topology | None
) -> Outcome:
    """The same without the drops that what is set makes needless."""
    for key in list(search.drops) if search.sets else ():
        del search.drops[key]
        try:
            fewer = attempt(search)
        except ConfigError:
            search.drops[key] = None
            continue
        if next(_refused(fewer, topology), None) is None:
            outcome = fewer
        else:
            search.drops[key] = None
    return outcome


class _Search:
    """What is set and dropped so far."""

    def __init__(self, *, only_drop: bool) -> None:
        self.sets: dict[str, str] = {}
        self.drops: dict[str, None] = {}
        self._open = {} if only_drop else {field: list(values) for field, values in _INSTEAD.items()}

    @property
    def overrides(self) -> tuple[str, ...]:
        return tuple(f"{field}={value}" for field, value in self.sets.items())

    def improve(self, refused: Iterable[_RefusedKey]) -> bool:
        """For each refused key, set a field that it decides, or drop it if nothing is left to set; whether there was
        something to do.
        """
        changed = False
        set_now: set[str] = set()
        for key, fields in refused:
            if set_now & set(fields):
                continue
            field = next((field for field in _INSTEAD if field in fields and self._open.get(field)), None)
            if field:
                self.sets[field] = self._open[field].pop(0)
                set_now.add(field)
                changed = True
            elif key and key not in self.drops and not self.drops.keys() & set(_above(key)):
                self.drops[key] = None
                self.sets = {field: value for field, value in self.sets.items() if field not in fields}
                changed = True
        self.drops = {key: None for key in self.drops if not self.drops.keys() & set(_above(key))}
        return changed


def _above(key: str) -> Iterator[str]:
    """The keys that take this one along when they are dropped."""
    return (key[:at] for at, character in enumerate(key) if character in ".[")


def _refused(outcome: Outcome, topology: Topology | None) -> Iterator[_RefusedKey]:
    """Each refused key, and the fields that it decides."""
    refused = outcome.of(Fit.UNSUPPORTED)
    for item in refused:
        effect = item.entry.effect
        if item.of_override:
            yield "", effect.decides
        else:
            yield item.key, (*(field for field in effect.decides if field not in _TARGETS), *effect.fields)
    if not refused:
        yield from _refused_by_engine(outcome, topology)


def _refused_by_engine(outcome: Outcome, topology: Topology | None) -> Iterator[_RefusedKey]:
    try:
        check(outcome, topology)
    except ConfigError as error:
        paths = [problem.path for problem in error.problems]
        entries = [entry for entry in outcome.reading.entries if not entry.assumed]
        refusals = [
            (entry.key, tuple(entry.effect.fields))
            for entry in entries
            if any(path in entry.effect.fields for path in paths)
        ]
        yield from refusals or [("", tuple(paths))]
