"""What a training does otherwise without the keys that are left out of a document on request."""

from __future__ import annotations

from collections.abc import Iterator

from unishard.config import Config, leaves, value_at
from unishard.config.describe import shown
from unishard.contract.entries import Entry, Undecided
from unishard.contract.rules import Fit
from unishard.formats.reading import ReadDocument
from unishard.formats.translating import Outcome

_FIELDS = frozenset(path for path, _ in leaves(Config))


def with_effects(outcome: Outcome, whole: ReadDocument) -> Outcome:
    """The outcome, where each dropped key says what its absence changes.

    Args:
        outcome: The translation without the keys.
        whole: The document with them.
    """
    own = {entry.key: entry for entry in whole.entries if not entry.assumed}
    within: dict[str, list[Entry]] = {}
    for key, entry in own.items():
        for name in _with_blocks(key):
            within.setdefault(name, []).append(entry)

    def entries_of(key: str) -> list[Entry]:
        """What a key says: its entry and those below it, or that of the block around it which is one value."""
        return within.get(key) or [own[name] for name in _with_blocks(key) if name in own]

    return outcome._replace(
        dropped=tuple(one._replace(effect=_effect(entries_of(one.key), outcome)) for one in outcome.dropped)
    )


def _with_blocks(key: str) -> Iterator[str]:
    """The key and the blocks around it."""
    return (f"{key}."[:at] for at, character in enumerate(f"{key}.") if character == ".")


def _effect(entries: list[Entry], outcome: Outcome) -> str:
    if not entries:
        return ""
    effect = entries[0].effect
    why = effect.note.partition("; ")[0]
    now = ", ".join(dict.fromkeys(said for entry in entries for said in _now(entry, outcome)))
    if effect.fit is Fit.UNSUPPORTED:
        return f"the training goes without it{now and f': {now}'}{why and f' ({why})'}"
    if now:
        return f"changes the training: {now}"
    if effect.fields or not effect.native:
        return f"the translation means the same{'' if effect.fields or not why else f': {why}'}"
    return f"left to the default of {next(iter(effect.native)).partition('.')[0]}{why and f' ({why})'}"


def _now(entry: Entry, outcome: Outcome) -> Iterator[str]:
    """Each field that the key decides, and what holds now, where that is something else."""
    reading, effect = outcome.reading, entry.effect
    others = {change.field: change.after.value for change in outcome.changes}
    for field in dict.fromkeys(path for path in (*effect.fields, *effect.decides) if path in _FIELDS):
        before = effect.fields.get(field)
        after = others.get(field, value_at(reading.config, field))
        if field in reading.undecided and field not in others:
            if not isinstance(before, Undecided):
                yield f"{field} comes from {reading.undecided[field].who}"
        elif field not in effect.fields:
            yield f"{field} is {shown(after)}"
        elif isinstance(before, Undecided):
            yield f"{field} is {shown(after)}, no longer from {before.who}"
        elif after != (tuple(before) if isinstance(after, tuple) and isinstance(before, list) else before):
            yield f"{field} is {shown(after)} instead of {shown(before)}"
