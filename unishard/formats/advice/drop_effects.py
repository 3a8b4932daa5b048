"""What a training does otherwise without the keys that are left out of a document on request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from unishard.config import Config, leaves
from unishard.config.describe import shown
from unishard.contract.entries import Entry, Undecided
from unishard.contract.rules import Fit
from unishard.errors import in_parts
from unishard.formats.reading.document import ReadDocument
from unishard.formats.report.comparing import FieldRow, join
from unishard.formats.report.readback import same
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

    rows = {row.field: row for row in join(whole, outcome.reading)}
    rows |= {one.field: one._replace(after=one.after._replace(open=False)) for one in outcome.changes}
    return outcome._replace(
        dropped=tuple(one._replace(effect=_effect(entries_of(one.key), rows)) for one in outcome.dropped)
    )


def _with_blocks(key: str) -> Iterator[str]:
    """The key and the blocks around it."""
    return (f"{key}."[:at] for at, character in enumerate(f"{key}.") if character == ".")


def _effect(entries: list[Entry], rows: Mapping[str, FieldRow]) -> str:
    if not entries:
        return ""
    effect = entries[0].effect
    why, _ = in_parts(effect.note)
    now = ", ".join(dict.fromkeys(said for entry in entries for said in _now(entry, rows)))
    if effect.fit is Fit.UNSUPPORTED:
        return f"the training goes without it{now and f': {now}'}{why and f' ({why})'}"
    if now:
        return f"changes the training: {now}"
    if effect.fields or not effect.native:
        return f"the translation means the same{'' if effect.fields or not why else f': {why}'}"
    return f"left to the default of {next(iter(effect.native)).partition('.')[0]}{why and f' ({why})'}"


def _now(entry: Entry, rows: Mapping[str, FieldRow]) -> Iterator[str]:
    """Each field that the key decides, and what holds now, where that is something else."""
    effect = entry.effect
    for field in dict.fromkeys(path for path in (*effect.fields, *effect.decides) if path in _FIELDS):
        before, after = effect.fields.get(field), rows[field].after
        if after.open:
            if not isinstance(before, Undecided):
                yield f"{field} comes from {after.origin}"
        elif field not in effect.fields:
            yield f"{field} is {shown(after.value)}"
        elif isinstance(before, Undecided):
            yield f"{field} is {shown(after.value)}, no longer from {before.who}"
        elif not same(after.value, before):
            yield f"{field} is {shown(after.value)} instead of {shown(before)}"
