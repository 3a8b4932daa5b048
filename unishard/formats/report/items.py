"""What became of one key of a document in a document of another format, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from unishard.config import value_at
from unishard.config.nested import flat
from unishard.contract.entries import Entry, KeyEffect
from unishard.contract.render import FieldResult, RenderedDocument
from unishard.contract.rules import NO_KEY, SCRIPT, Fit, worst
from unishard.formats.engines.same import of_engine, stays_with_engine
from unishard.formats.format import Format
from unishard.formats.reading.document import ReadDocument

_SET = "--set "


SAME_DEFAULT = "the same default there"


class Item(NamedTuple):
    """What became of one key."""

    entry: Entry
    """The key; `--set FIELD` for an override that is refused."""
    fit: Fit
    written: tuple[FieldResult, ...] = ()
    """What says it in the other format; empty where nothing does."""
    reasons: tuple[str, ...] = ()
    line: int | None = None
    """Of the key in its file."""
    notable: bool = False
    """Whether the default report has a line for it although its tool assumes it."""

    @property
    def becomes(self) -> str:
        """What says it in the other format, in words."""
        return ", ".join(dict.fromkeys(word.key for word in self.written if word.key))

    @property
    def note(self) -> str:
        """The reasons, in words."""
        return "; ".join(dict.fromkeys(filter(None, self.reasons)))

    @property
    def keys(self) -> frozenset[str]:
        """The dotted keys of the other document that hold it."""
        return frozenset(key for word in self.written for key in word.keys)

    @property
    def by_script(self) -> bool:
        """Whether the training script says it there."""
        return any(word.key == SCRIPT for word in self.written)

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
    item = _unless_left(_item(entry, reading, target, written), reading, target, written)
    line = None if entry.assumed or entry.supplied else reading.source.origins.of(entry.path).line
    return item._replace(line=line, notable=entry.assumed and entry.effect.notable)


def refused_overrides(overrides: Iterable[str], reading: ReadDocument, written: RenderedDocument) -> Iterator[Item]:
    """Overrides that are not supported, of fields that no key of the document decides."""
    fields = {field for entry in reading.entries for field in entry.effect.fields}
    for text in overrides:
        field = text.partition("=")[0].strip()
        result = written.fields.get(field)
        if result and result.fit is Fit.UNSUPPORTED and field not in fields:
            effect = KeyEffect(Fit.UNSUPPORTED, result.note, decides=(field,))
            entry = Entry((f"{_SET}{field}",), value_at(reading.config, field), effect)
            yield Item(entry, result.fit, (result,), (result.note,))


def _unless_left(item: Item, reading: ReadDocument, target: Format, written: RenderedDocument) -> Item:
    """The item, which is exact for a default of the engine or a setting without a field where another tool drives the
    same engine.
    """
    entry = item.entry
    if target.name == "unishard" or item.fit not in (Fit.EQUIVALENT, Fit.APPROXIMATE):
        return item
    if target.engine not in ("", reading.config.backend) or not stays_with_engine(reading):
        return item
    there = of_engine(entry, written.document)
    if not there and (entry.assumed or entry.usual):
        return Item(entry, Fit.EXACT, reasons=(SAME_DEFAULT,))
    if entry.assumed:
        return item
    if entry.effect.fields or not there or any(value != entry.value for value in there.values()):
        return item
    return Item(entry, Fit.EXACT, (FieldResult(Fit.EXACT, entry.key, "", tuple(there)),))


def _item(entry: Entry, reading: ReadDocument, target: Format, written: RenderedDocument) -> Item:
    effect = entry.effect
    if as_it_is := written.fields.get(entry.as_it_is):
        return Item(entry, as_it_is.fit, (as_it_is,), (as_it_is.note,))
    if effect.fit is Fit.UNSUPPORTED:
        return Item(entry, Fit.UNSUPPORTED, reasons=(effect.note,))
    if effect.copy_verbatim and reading.format == target.name and effect.fields.keys() <= reading.undecided.keys():
        return Item(entry, Fit.EXACT, (FieldResult.held(entry.key),), ("kept",))
    own = _native_item(entry, reading, written) if effect.native else None
    if not effect.fields:
        return own or Item(entry, effect.fit, reasons=(effect.note,))
    if own is not None:
        held = _item_of_fields(entry.but(Fit.EXACT, ""), reading, written)
        return Item(entry, worst(held.fit, own.fit), held.written + own.written, held.reasons + own.reasons)
    return _item_of_fields(entry, reading, written)


def _native_item(entry: Entry, reading: ReadDocument, written: RenderedDocument) -> Item:
    """What became of settings that only one engine has: exact where the document that is written holds them, or says
    that it does.
    """
    words = [_native_setting(path, reading, written) for path in entry.effect.native]
    worst_result = max(words, key=lambda result: result.fit.severity)
    if worst_result.fit is Fit.EXACT:
        return Item(entry, Fit.EXACT, tuple(words))
    # What is lost where the setting is dropped, the key itself says.
    own = entry.effect.fit
    fit = own if worst_result.fit is Fit.IGNORED else worst(own, worst_result.fit)
    return Item(entry, fit, reasons=(entry.effect.note, worst_result.note))


def _native_setting(path: str, reading: ReadDocument, written: RenderedDocument) -> FieldResult:
    engine, _, key = path.partition(".")
    if engine != reading.config.backend:
        return _DROPPED
    if result := written.fields.get(f"native.{path}"):
        return result
    held = [name for name, _ in flat(written.document) if f".{key}." in f".{name}."]
    return FieldResult.held(min(held, key=len)) if held else _DROPPED


_DROPPED = FieldResult(Fit.IGNORED, "", "")


def _left_to_the_tool(field: str, written: RenderedDocument) -> bool:
    """Whether a document says nothing of an undecided field: neither `auto` nor a placeholder."""
    result = written.fields.get(field)
    return result is not None and result.fit is Fit.NEEDS_INPUT and not result.keys


def _unknown(entry: Entry, fields: list[str], reading: ReadDocument) -> Item:
    """A key with unknown fields that the other format cannot leave open: its tool's defaults would train
    differently.
    """
    who = reading.undecided[fields[0]].who
    note = f"{who}, says {', '.join(fields)}; add it, or {' '.join(f'--set {field}=...' for field in fields)}"
    return Item(entry, Fit.UNSUPPORTED, reasons=(note,))


def _item_of_fields(entry: Entry, reading: ReadDocument, written: RenderedDocument) -> Item:
    """Of what the key means and what the other format makes of it, the worse."""
    own = entry.effect
    left = [field for field in own.fields if field in reading.undecided]
    if missing := [field for field in left if reading.undecided[field].required and _left_to_the_tool(field, written)]:
        return _unknown(entry, missing, reading)
    words = [written.fields[field] for field in own.fields if field in written.fields]
    severest = worst(*(word.fit for word in words))
    fit, notes = worst(own.fit, severest), [own.note] if own.fit is not Fit.EXACT or own.notable else []
    if own.fit is Fit.NEEDS_INPUT:
        # Whether it must be decided now is the other format's to say.
        fit, notes = severest, notes if left and severest is Fit.NEEDS_INPUT else []
    elif severest is Fit.NEEDS_INPUT:
        notes += [f"{field} comes from {reading.undecided[field].who}" for field in left]
    notes += [word.note for word in words if word.fit is not Fit.EXACT]
    return Item(entry, fit, tuple(word for word in words if word.key != NO_KEY), tuple(notes))
