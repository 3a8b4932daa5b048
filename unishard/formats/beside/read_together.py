"""What a document says, and what is read beside it, each as its tool reads it where it has the other."""

from __future__ import annotations

from unishard.config.describe import shown
from unishard.contract.entries import Entry, KeyEffect, Path
from unishard.contract.render import AUTO
from unishard.contract.rules import Fit
from unishard.errors import in_parts
from unishard.formats import catalog
from unishard.formats.beside import launcher_config
from unishard.formats.beside.engine_choice import RECIPES
from unishard.formats.beside.precedence import same_value
from unishard.formats.beside.supplied import Supplied, trainer
from unishard.formats.reading.document import ReadDocument

_ENGINES = ("deepspeed", "fsdp", "fsdp_config")
"""Arguments in which a script names the engine's config, which is the document itself."""
_STRATEGY = ("backend", "sharding.", "offload.")
_OF_LAUNCHER = ("precision.compute", "training.gradient_accumulation_steps", "training.gradient_clipping")
"""What a config of Accelerate says about the loop, whatever engine it drives; it also says how processes start."""


def read_together(reading: ReadDocument, supplied: Supplied, *, same: bool) -> tuple[list[Entry], list[Entry]]:
    """The entries of a document, and those of what is beside it.

    Args:
        reading: The document.
        supplied: What is beside it.
        same: Whether the document is written in its own format again.
    """
    if reading.format in RECIPES:
        return _merged(reading, supplied, same=same)
    return _beside(reading, supplied, same=same)


def _merged(reading: ReadDocument, supplied: Supplied, *, same: bool) -> tuple[list[Entry], list[Entry]]:
    """A document that is a file of arguments itself: both are read as one.

    A command that hands the file to its script counts more.
    """
    section = trainer().section_of(reading.source.data)
    data, more = trainer().arguments_in(reading.source.data), supplied.values
    starts = supplied.starts(reading)
    twice = [
        key for key in data if key in more and (starts or key not in _ENGINES) and not same_value(more[key], data[key])
    ]
    yielding = twice if starts and not same else []
    kept = {key: value for key, value in data.items() if key not in yielding}
    whole = {**more, **kept}
    document = {**reading.source.data, section: whole} if section else whole
    entries = catalog.get(reading.format).entries(reading.source._replace(data=document), supplied.topology)
    given = [_below(entry, section)[0] in more.keys() - kept.keys() for entry in entries]
    own = [entry for entry, theirs in zip(entries, given, strict=True) if not theirs]
    own += [
        Entry(_path(key, section), data[key], KeyEffect(Fit.IGNORED, f"{supplied.place(key)} says {shown(more[key])}"))
        for key in yielding
    ]
    placed = (supplied.placed(entry.at(*_below(entry, section))) for entry in entries)
    added = [entry for entry, theirs in zip(placed, given, strict=True) if theirs]
    left = (key for key in twice if key not in yielding)
    return own, [*added, *(_stays(key, supplied) if starts else _clash(key, reading, supplied) for key in left)]


def _path(key: str, section: str | None) -> Path:
    return (section, key) if section else (key,)


def _below(entry: Entry, section: str | None) -> Path:
    """Where an entry stands in the arguments, which a section may hold."""
    return entry.path[1:] if section and entry.path[0] == section else entry.path


def _stays(key: str, supplied: Supplied) -> Entry:
    effect = KeyEffect(Fit.IGNORED, launcher_config.STAYS, notable=True)
    return Entry((key,), supplied.values[key], effect, place=supplied.place(key), supplied=True)


def _clash(key: str, reading: ReadDocument, supplied: Supplied) -> Entry:
    path = _path(key, trainer().section_of(reading.source.data))
    place, value = str(reading.source.origins.of(path)), supplied.values[key]
    own = shown(trainer().arguments_in(reading.source.data)[key])
    note = f"is {own} in {place or 'the config'}; make them equal, or leave one out"
    return Entry((key,), value, KeyEffect(Fit.UNSUPPORTED, note), place=supplied.place(key), supplied=True)


def _beside(reading: ReadDocument, supplied: Supplied, *, same: bool) -> tuple[list[Entry], list[Entry]]:
    """A document for an engine or a launcher: its engine's config is what the arguments would name."""
    engine, where = catalog.get(reading.format).for_trainer(reading.source)
    values = {key: value for key, value in supplied.values.items() if key not in _ENGINES}
    whole = supplied.format in RECIPES
    entries = supplied.entries({**values, **(engine if whole or not supplied.format else {})}, reading.source)
    added = [supplied.placed(entry) for entry in entries if entry.path[0] not in _ENGINES]
    added = [
        _of_the_loop(entry, of_launcher=not whole and bool(supplied.format))
        for entry in added
        if whole or not entry.assumed
    ]
    launched, switch = launcher_config.as_launched(reading, supplied, whole=whole, same=same)
    if switch:
        added = [entry for entry in added if entry.path != (switch,)] + ([_stays(switch, supplied)] if same else [])
    if not whole or where is None:
        return launched, added
    inner = {
        (*where, *entry.path[1:]): entry for entry in entries if entry.path[0] == _ENGINES[0] and len(entry.path) > 1
    }
    own = [_again(entry, inner[entry.path], supplied, where) if entry.path in inner else entry for entry in launched]
    return own, added


def _of_the_loop(entry: Entry, *, of_launcher: bool) -> Entry:
    """The entry without what the document itself says, which is how the engine shards."""
    effect = entry.effect
    if of_launcher:
        fields = {
            field: value
            for field, value in effect.fields.items()
            if field in _OF_LAUNCHER or field.startswith("launch.")
        }
        return entry._replace(effect=KeyEffect(fields=fields, unknown=effect.unknown))
    fields = {field: value for field, value in effect.fields.items() if not field.startswith(_STRATEGY)}
    return entry._replace(effect=effect._replace(fields=fields, native={}))


def _again(entry: Entry, filled_in: Entry, supplied: Supplied, where: Path) -> Entry:
    """The entry as it is once transformers has filled in the engine's config."""
    if entry.effect.fit is Fit.UNSUPPORTED:
        return entry
    refused = filled_in.effect.fit is Fit.UNSUPPORTED and not entry.assumed
    names = trainer().filled_from(".".join(entry.path[len(where) :]))
    named = next((name for name in names if name in supplied.values), None)
    place = (supplied.place(named) if named else supplied.default) if names else ""
    if refused and place:
        what, instead = in_parts(filled_in.effect.note)
        return entry._replace(effect=filled_in.effect._replace(note=f"{what} ({place}); {instead}"))
    known = entry.value == AUTO and filled_in.effect.fit is not Fit.NEEDS_INPUT
    return entry._replace(effect=filled_in.effect, place=place if known else "")
