"""Which of the values that are read beside a document count: those that it leaves open, and none that it decides."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import Entry, KeyEffect, Undecided
from unishard.contract.rules import Fit
from unishard.formats.reading.document import ReadDocument

_COMPUTE, _REDUCE = "precision.compute", "precision.reduce"


def counting(
    own: Sequence[Entry], added: Sequence[Entry], reading: ReadDocument, changed: Collection[str], *, same: bool
) -> Iterator[Entry]:
    """The entries of the arguments that decide what a document leaves open, and those that contradict it.

    Args:
        own: What the document says.
        added: What the arguments say.
        reading: The document.
        changed: Fields that overrides decide.
        same: Whether the document is written in its own format, where only what it names is filled.
    """
    document = _Decisions(own, changed, same=same)
    written = {field for entry in added if not entry.assumed for field in entry.effect.fields}
    for entry in added:
        effect = entry.effect
        if effect.unknown or (entry.assumed and written.issuperset(effect.fields)):
            continue
        if not effect.fields and effect.notable and not entry.assumed:
            yield entry._replace(effect=KeyEffect(effect.fit, effect.note))
        elif effect.fit is Fit.UNSUPPORTED:
            if document.leaves_to_refused(entry):
                yield entry
        elif clash := document.clash(entry):
            yield _contradicting(entry, clash, reading)
        elif fields := document.left_open(entry):
            yield entry._replace(effect=KeyEffect(effect.fit, effect.note, fields))


class _Decisions:
    """What a document and the overrides decide."""

    def __init__(self, own: Sequence[Entry], changed: Collection[str], *, same: bool) -> None:
        self._holders = dict(_holders(own))
        self._changed = changed
        self._same = same
        self._open = {
            field
            for entry in own
            for field, value in entry.effect.fields.items()
            if isinstance(value, Undecided) or entry.place
        }
        self._refused = {
            field for entry in own if entry.effect.fit is Fit.UNSUPPORTED for field in entry.effect.decides
        }

    def leaves_to_refused(self, entry: Entry) -> bool:
        """Whether a refused argument would decide what is open, so that it cannot be left out."""
        decides = entry.effect.decides
        settled = any(field in self._holders or field in self._changed for field in decides)
        return not (entry.assumed or settled or (self._same and not self._open.intersection(decides)))

    def clash(self, entry: Entry) -> Entry | None:
        """The key of the document that says otherwise than an argument."""
        return next(
            (
                self._holders[field]
                for field, value in entry.effect.fields.items()
                if self._clashes(entry, field, value)
            ),
            None,
        )

    def _clashes(self, entry: Entry, field: str, value: Any) -> bool:
        holder = self._holders.get(field)
        if holder is None or holder.assumed or entry.assumed or field in self._changed or isinstance(value, Undecided):
            return False
        return not same_value(holder.effect.fields[field], value)

    def left_open(self, entry: Entry) -> dict[str, Any]:
        """The fields of an argument that nothing else decides."""
        fields = {
            field: value
            for field, value in entry.effect.fields.items()
            if field not in self._changed
            and field not in self._refused
            and self._fills_in(entry, field, value)
            and (not self._same or field in self._open)
        }
        if _COMPUTE in fields and _REDUCE in self._open:
            return {_REDUCE: fields[_COMPUTE], **fields}  # DeepSpeed reduces in the dtype of compute
        return fields

    def _fills_in(self, entry: Entry, field: str, value: Any) -> bool:
        holder = self._holders.get(field)
        if holder is None:
            return True
        if isinstance(value, Undecided):
            return False
        return (holder.assumed and not entry.assumed) or (
            not holder.assumed and same_value(holder.effect.fields[field], value)
        )


def _holders(own: Iterable[Entry]) -> Iterator[tuple[str, Entry]]:
    """The entry that decides each field: a written one before an assumed one."""
    for entry in sorted(own, key=lambda entry: not entry.assumed):
        for field, value in entry.effect.fields.items():
            if not isinstance(value, Undecided):
                yield field, entry


def _contradicting(entry: Entry, argument: Entry, reading: ReadDocument) -> Entry:
    place = str(reading.source.origins.of(argument.path))
    where = f" ({place})" if place else ""
    note = f"contradicts {argument.key}, which is {shown(argument.value)}{where}; make them equal, or leave one out"
    return entry.but(Fit.UNSUPPORTED, note)


def same_value(first: Any, second: Any) -> bool:
    """Whether two values are equal, as numbers if both are."""
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same_value, first, second))
    try:
        return float(first) == float(second)
    except (TypeError, ValueError):
        return bool(first == second)
