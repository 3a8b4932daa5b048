"""Which of the values that are read beside a document count: those that it leaves open, and none that it decides."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import Entry, KeyEffect, Undecided
from unishard.contract.rules import Fit
from unishard.formats.reading import ReadDocument

__all__ = ["fills", "same_value"]

_COMPUTE, _REDUCE = "precision.compute", "precision.reduce"


def fills(
    own: Sequence[Entry], given: Sequence[Entry], reading: ReadDocument, changed: Collection[str], *, same: bool
) -> Iterator[Entry]:
    """The entries of the arguments that decide what a document leaves open, and those that contradict it.

    Args:
        own: What the document says.
        given: What the arguments say.
        reading: The document.
        changed: Fields that overrides decide.
        same: Whether the document is written in its own format, where only what it names is filled.
    """
    holders = dict(_holders(own))
    open_ = {
        field
        for entry in own
        for field, value in entry.effect.fields.items()
        if isinstance(value, Undecided) or entry.place
    }
    refused = {field for entry in own if entry.effect.fit is Fit.UNSUPPORTED for field in entry.effect.decides}
    written = {field for entry in given if not entry.assumed for field in entry.effect.fields}
    for entry in given:
        if entry.effect.unknown or (entry.assumed and written.issuperset(entry.effect.fields)):
            continue
        if entry.effect.fit is Fit.IGNORED and entry.effect.notable and not entry.assumed:
            yield entry._replace(effect=KeyEffect(Fit.IGNORED, entry.effect.note))
            continue
        if entry.effect.fit is Fit.UNSUPPORTED:
            settled = any(field in holders or field in changed for field in entry.effect.decides)
            if not (entry.assumed or settled or (same and not open_.intersection(entry.effect.decides))):
                yield entry
            continue
        clashes = [
            holders[field]
            for field, value in entry.effect.fields.items()
            if _clashes(entry, field, value, holders, changed)
        ]
        if clashes:
            yield _contradicting(entry, clashes[0], reading)
            continue
        fields = {
            field: value
            for field, value in entry.effect.fields.items()
            if field not in changed
            and field not in refused
            and _fills_in(entry, field, value, holders)
            and (not same or field in open_)
        }
        if _COMPUTE in fields and _REDUCE in open_:
            fields = {_REDUCE: fields[_COMPUTE], **fields}  # DeepSpeed reduces in the dtype of compute
        if fields:
            yield entry._replace(effect=KeyEffect(entry.effect.fit, entry.effect.note, fields))


def _holders(own: Iterable[Entry]) -> Iterator[tuple[str, Entry]]:
    """The entry that decides each field: a written one before an assumed one."""
    for entry in sorted(own, key=lambda entry: not entry.assumed):
        for field, value in entry.effect.fields.items():
            if not isinstance(value, Undecided):
                yield field, entry


def _clashes(entry: Entry, field: str, value: Any, holders: Mapping[str, Entry], changed: Collection[str]) -> bool:
    holder = holders.get(field)
    if holder is None or holder.assumed or entry.assumed or field in changed or isinstance(value, Undecided):
        return False
    return not same_value(holder.effect.fields[field], value)


def _fills_in(entry: Entry, field: str, value: Any, holders: Mapping[str, Entry]) -> bool:
    holder = holders.get(field)
    if holder is None:
        return True
    if isinstance(value, Undecided):
        return False
    return (holder.assumed and not entry.assumed) or (
        not holder.assumed and same_value(holder.effect.fields[field], value)
    )


def _contradicting(entry: Entry, other: Entry, reading: ReadDocument) -> Entry:
    place = str(reading.source.origins.of(other.path))
    where = f" ({place})" if place else ""
    note = f"contradicts {other.key}, which is {shown(other.value)}{where}; make them equal, or leave one out"
    return entry.but(Fit.UNSUPPORTED, note)


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are equal, as numbers if both are."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return bool(one == other)
