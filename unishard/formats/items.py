"""What became of one key of a document in a document of another format, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from unishard.config import value_at
from unishard.config.loading.placeholders import placeholder
from unishard.config.nested import flat
from unishard.contract.entries import Entry, KeyEffect
from unishard.contract.render import KEPT_AUTO, LEFT_OUT, FieldResult, RenderedDocument
from unishard.contract.rules import NO_KEY, Fit, worst
from unishard.formats.format import Format
from unishard.formats.reading import ReadDocument
from unishard.formats.same_engine import left_to_engine, stays_with_engine

_SET = "--set "


class Item(NamedTuple):
    """What became of one key."""

    entry: Entry
    """The key; `--set FIELD` for an override that is refused."""
    fit: Fit
    becomes: str
    """What says it in the other format, in words; empty where nothing does."""
    note: str
    line: int | None = None
    """Of the key in its file."""
    notable: bool = False
    """Whether the default report has a line for it although its tool assumes it."""

    @property
    def of_override(self) -> bool:
        """Whether it is an override's, not a key's."""
        return self.entry.path[0].startswith(_SET)

    @property
    def key(self) -> str:
        """The key as people write it."""
        return self.entry.key

    @property
    def value(self) -> Any:
        """Of the key."""
        return self.entry.value

    @property
    def assumed(self) -> bool:
        """Whether the document does not have the key, and its tool assumes this value."""
        return self.entry.assumed

    @property
    def place(self) -> str:
        """Where the value comes from if not from the document: what was read beside it, or the default of that."""
        return self.entry.place

    @property
    def supplied(self) -> bool:
        """Whether the key stands in what `--with` names, not in the document."""
        return self.entry.supplied


def item_of(entry: Entry, reading: ReadDocument, target: Format, written: RenderedDocument) -> Item:
    """What became of a key.

    Args:
        entry: The key.
        reading: The document that has it.
        target: The other format.
        written: What that makes of the config.
    """
    result = _unless_left(_result(entry, reading, target, written), entry, reading, target, written)
    line = None if entry.assumed or entry.supplied else reading.source.origins.of(entry.path).line
    return Item(entry, result.fit, result.key, result.note, line, entry.assumed and entry.effect.notable)


def refused_overrides(overrides: Iterable[str], reading: ReadDocument, written: RenderedDocument) -> Iterator[Item]:
    """Overrides that are not supported, of fields that no key of the document decides."""
    fields = {field for entry in reading.entries for field in entry.effect.fields}
    for text in overrides:
        field = text.partition("=")[0].strip()
        result = written.fields.get(field)
        if result and result.fit is Fit.UNSUPPORTED and field not in fields:
            effect = KeyEffect(Fit.UNSUPPORTED, result.note, decides=(field,))
            entry = Entry((f"{_SET}{field}",), value_at(reading.config, field), effect)
            yield Item(entry, result.fit, result.key, result.note)


def _unless_left(
    result: FieldResult, entry: Entry, reading: ReadDocument, target: Format, written: RenderedDocument
) -> FieldResult:
    """The result, which is exact for a default of the engine or a setting without a field where another tool drives the
    same engine.
    """
    if (
        target.name == "unishard"
        or result.fit not in (Fit.EQUIVALENT, Fit.APPROXIMATE)
        or not stays_with_engine(reading)
    ):
        return result
    if (entry.effect.fields and not entry.assumed) or not left_to_engine(entry, written.document):
        return result
    return FieldResult(Fit.EXACT, "" if entry.assumed else entry.key, "the same default there" if entry.assumed else "")


def _result(entry: Entry, reading: ReadDocument, target: Format, written: RenderedDocument) -> FieldResult:
    effect = entry.effect
    if as_it_is := written.fields.get(entry.as_it_is):
        return as_it_is
    if effect.fit is Fit.UNSUPPORTED:
        return FieldResult(Fit.UNSUPPORTED, "", effect.note)
    if effect.copy_verbatim and reading.format == target.name and effect.fields.keys() <= reading.undecided.keys():
        return FieldResult(Fit.EXACT, entry.key, "kept")
    own = _native_result(entry, reading, written) if effect.native else None
    if not effect.fields:
        return own or FieldResult(effect.fit, "", effect.note)
    if own is None:
        result = _field_result(entry, reading, written)
        silent = entry.assumed and reading.format == target.name and result.note.endswith(LEFT_OUT)
        left = f"{effect.note}; still left to it" if effect.notable else "still left to the tool's default"
        return FieldResult(Fit.EXACT, "", left) if silent else result
    field_result = _field_result(entry.but(Fit.EXACT, ""), reading, written)
    becomes, note = (
        ", ".join(filter(None, (field_result.key, own.key))),
        "; ".join(filter(None, (field_result.note, own.note))),
    )
    return FieldResult(worst(field_result.fit, own.fit), becomes, note)


def _native_result(entry: Entry, reading: ReadDocument, written: RenderedDocument) -> FieldResult:
    """What became of settings that only one engine has: exact where the document that is written holds them, or says
    that it does.
    """
    words = [_native_setting(path, reading, written) for path in entry.effect.native]
    worst_result = max(words, key=lambda result: result.fit.severity)
    if worst_result.fit is Fit.EXACT:
        return FieldResult(Fit.EXACT, ", ".join(word.key for word in words), "")
    # What is lost where the setting is dropped, the key itself says.
    own = entry.effect.fit
    fit = own if worst_result.fit is Fit.IGNORED else worst(own, worst_result.fit)
    return FieldResult(fit, "", "; ".join(dict.fromkeys(filter(None, (entry.effect.note, worst_result.note)))))


def _native_setting(path: str, reading: ReadDocument, written: RenderedDocument) -> FieldResult:
    engine, _, key = path.partition(".")
    if engine != reading.config.backend:
        return FieldResult(Fit.IGNORED, "", "")
    if result := written.fields.get(f"native.{path}"):
        return result
    held = [name for name, _ in flat(written.document) if f".{key}." in f".{name}."]
    return FieldResult(Fit.EXACT, min(held, key=len), "") if held else FieldResult(Fit.IGNORED, "", "")


_SAID = FieldResult(Fit.EXACT, "", "")


def _left_to_the_tool(field: str, written: RenderedDocument) -> bool:
    """Whether a document says nothing of an undecided field: neither `auto` nor a placeholder."""
    result = written.fields.get(field, _SAID)
    return (
        result.fit is Fit.NEEDS_INPUT
        and result.note != KEPT_AUTO
        and placeholder(field) not in dict(flat(written.document)).values()
    )


def _unknown(fields: list[str], reading: ReadDocument) -> FieldResult:
    """The outcome of a key with unknown fields that the other format cannot leave open: its tool's defaults would train
    differently.
    """
    who = reading.undecided[fields[0]].who
    note = f"{who}, says {', '.join(fields)}; add it, or {' '.join(f'--set {field}=...' for field in fields)}"
    return FieldResult(Fit.UNSUPPORTED, "", note)


def _field_result(entry: Entry, reading: ReadDocument, written: RenderedDocument) -> FieldResult:
    """Of what the key means and what the other format makes of it, the worse."""
    own = entry.effect
    left = [field for field in own.fields if field in reading.undecided]
    if missing := [field for field in left if reading.undecided[field].required and _left_to_the_tool(field, written)]:
        return _unknown(missing, reading)
    words = [written.fields[field] for field in own.fields if field in written.fields]
    severest = worst(*(word.fit for word in words))
    fit, notes = worst(own.fit, severest), [own.note] if own.fit is not Fit.EXACT or own.notable else []
    if own.fit is Fit.NEEDS_INPUT:
        # Whether it must be decided now is the other format's to say.
        fit, notes = severest, notes if left and severest is Fit.NEEDS_INPUT else []
    elif severest is Fit.NEEDS_INPUT:
        notes += [f"{field} comes from {reading.undecided[field].who}" for field in left]
    notes += (
        [word.note for word in words if word.note and word.fit is not Fit.EXACT] if severest is not Fit.EXACT else []
    )
    becomes = ", ".join(dict.fromkeys(word.key for word in words if word.key not in ("", NO_KEY)))
    return FieldResult(fit, becomes, "; ".join(dict.fromkeys(filter(None, notes))))
