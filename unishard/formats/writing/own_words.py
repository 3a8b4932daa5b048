"""A document that is written for its own tool and engine again: its own words, but for what is decided otherwise."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from unishard.config.nested import Native, flat, is_within, merge, nested
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, Path, Undecided
from unishard.contract.render import AUTO, FieldResult, RenderedDocument
from unishard.contract.rules import Fit
from unishard.errors import ConfigError
from unishard.formats.format import Format
from unishard.formats.reading.document import ReadDocument
from unishard.formats.report.comparing import compare
from unishard.formats.report.readback import read_back

_Places = dict[Path, list[Entry]]
_ABSENT: Any = object()


def in_own_words(target: Format, reading: ReadDocument, topology: Topology) -> RenderedDocument | None:
    """The document, in which a key stays as it is unless its tool does not take it, or something that is asked for
    decides its fields: an override, a number of ranks, what is read beside it. These are written as for any source.

    Args:
        target: The document's own format.
        reading: What it says, with what is asked for.
        topology: The ranks.

    Returns:
        None where it lacks a key that its tool needs, and where words that stay say otherwise what a document that is
        written as for any source would say.
    """
    before, stays = target.read(reading.source), target.stays_in_place(reading.source)
    if any(entry.assumed and not entry.goes_through for entry in before.entries):
        return None
    written = target.write(reading, topology)
    unasked = dict(flat(target.write(before, before.topology or Topology()).document))
    new = {key for key, value in flat(written.document) if unasked.get(key, _ABSENT) != value}
    asked = {row.field for row in compare(before, reading)}
    places = _places(reading)
    anew = _changed(reading, places, _places(before), asked) if stays else set(places)
    named = {place for place, entries in places.items() if any(len(one.path) > len(place) for one in entries)} - anew
    compared = asked or named or not stays
    lost = _otherwise(target, written.document, reading) if compared else set()
    # A file that a document names may say nothing beside keys that are written: it is written out then.
    for gone in dict.fromkeys((frozenset(anew), frozenset(anew | named))):
        keys = new | _keys(places, gone, written)
        more = nested({key: value for key, value in flat(written.document) if is_within(key, keys)})
        document = merge(dict(_without(reading.source.data, gone)), more)
        if not compared or _otherwise(target, document, reading) <= lost:
            return RenderedDocument(
                document, {**dict(_fates(places, gone)), **written.fields, **dict(_kept(places, gone))}
            )
    return None


def _otherwise(target: Format, document: Native, reading: ReadDocument) -> set[str]:
    """The fields that a document says otherwise than they are to be, and the keys that its tool refuses; the whole, of
    no name, where it cannot be read.
    """
    try:
        back = read_back(target, document, reading)
    except ConfigError:
        return {""}
    refused = {entry.as_it_is for entry in back.entries if entry.refused_by_its_tool}
    return refused | {row.field for row in compare(reading, back)}


def _places(reading: ReadDocument) -> _Places:
    """The entries of a document by the value in it that says them: of a file that it names, all by that name."""
    places: _Places = {}
    for entry in reading.entries:
        if not entry.supplied:
            places.setdefault(_place(entry.path, reading.source.data), []).append(entry)
    return places


def _place(path: Path, data: Any) -> Path:
    for length, name in enumerate(path):
        if not isinstance(data, Mapping):
            return path[:length]
        data = data.get(name, {})
    return path


def _changed(reading: ReadDocument, places: _Places, before: _Places, asked: Collection[str]) -> set[Path]:
    """The places whose keys do not stay: their tool refuses one, or one says something else now."""
    filled = any(entry.supplied for entry in reading.entries)
    return {
        place
        for place, entries in places.items()
        if not all(_stays(entry, asked, filled=filled) for entry in entries)
        or (entries != before.get(place) and not all(map(_says_nothing, entries)))
    }


def _stays(entry: Entry, asked: Collection[str], *, filled: bool) -> bool:
    """Whether a key still says what is to be said; not a word for what others fill in, where that is known."""
    said = entry.effect.sayings
    open_ = not said or any(isinstance(value, Undecided) for value in said.values())
    return entry.goes_through and said.keys().isdisjoint(asked) and (open_ or not filled or entry.value != AUTO)


def _says_nothing(entry: Entry) -> bool:
    return entry.effect.copy_verbatim and not entry.effect.sayings


def _keys(places: _Places, anew: Collection[Path], written: RenderedDocument) -> set[str]:
    """The keys that say what the entries at these places say."""
    gone = [entry for place in anew for entry in places[place] if not entry.assumed]
    names = {name for entry in gone for name in (*entry.effect.sayings, entry.as_it_is)}
    return {key for name in names if name in written.fields for key in written.fields[name].keys}


def _fates(places: _Places, gone: Collection[Path]) -> Iterator[tuple[str, FieldResult]]:
    """What became of keys that are gone and say nothing of the config."""
    for entry in (entry for place in gone for entry in places[place] if not entry.effect.sayings):
        yield entry.as_it_is, FieldResult(entry.effect.fit, "", entry.effect.note)


def _kept(places: _Places, gone: Collection[Path]) -> Iterator[tuple[str, FieldResult]]:
    for entry in (entry for place, entries in places.items() if place not in gone for entry in entries):
        left = f"{entry.effect.note}; still left to it" if entry.effect.notable else "still left to the tool's default"
        silent = FieldResult(Fit.EXACT, "", left)
        yield entry.as_it_is, silent if entry.assumed else FieldResult.held(entry.key)


def _without(data: Mapping[str, Any], places: Collection[Path], above: Path = ()) -> Iterator[tuple[str, Any]]:
    """The keys of a document but for these, and for the blocks that this empties."""
    for name, value in data.items():
        path = (*above, name)
        if path in places:
            continue
        inner = dict(_without(value, places, path)) if isinstance(value, Mapping) else value
        if inner or inner == value:
            yield name, inner
