"""What two configs, of the same or of different tools, mean differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from unishard.config import Config, leaves, value_at
from unishard.config.nested import flat
from unishard.contract.entries import Entry
from unishard.contract.render import AUTO, FieldResult
from unishard.contract.rules import Fit
from unishard.contract.templates import is_placeholder
from unishard.formats.reading.document import ReadDocument


class Side(NamedTuple):
    """What one config says about one field."""

    value: Any
    """None where only the training script knows it; unishard's default where nothing is said."""
    origin: str
    """The key that says it, and its line; `default`, `override`, `not said`, or who decides it instead; for people."""
    said: bool
    """Whether the config, its tool or an override decides the value."""
    entry: Entry | None = None
    """The key that decides it, or leaves it open, or whose default does; None where none does."""
    open: bool = False
    """Whether somebody else decides it: the training script, or whoever fills in a placeholder."""

    @property
    def key(self) -> str:
        """The key that decides it; empty where none does."""
        return self.entry.key if self.said and self.entry else ""

    @property
    def silent(self) -> bool:
        """Whether nobody is known to decide it."""
        return not (self.said or self.open)


class FieldRow(NamedTuple):
    """One field: what one config says of it, and what another says, which may be a translation of it."""

    field: str
    before: Side
    after: Side
    written: FieldResult | None = None
    """What became of it where the one was written as the other."""

    @property
    def differs(self) -> bool:
        """Whether it means something else; what is undecided on both sides is no difference."""
        a, b = self.before, self.after
        if self.field == _RANKS and not (a.said and b.said):
            return False  # the launcher says it where the config does not
        if a.open and b.open:
            return a.origin != b.origin and _is_spelled_out(a.entry) and _is_spelled_out(b.entry)
        return a.open != b.open or bool(a.value != b.value)


def compare(a: ReadDocument, b: ReadDocument) -> tuple[FieldRow, ...]:
    """The fields in which two configs differ in meaning, in the order of the schema; settings that only one engine has
    come last.

    What a tool assumes counts as said. A field about which a config says nothing has unishard's default, which is that
    of its tool, or else the training script's to decide. What is undecided on both sides is no difference.
    """
    return tuple(row for row in join(a, b) if row.differs)


def join(a: ReadDocument, b: ReadDocument, written: Mapping[str, FieldResult] | None = None) -> Iterator[FieldRow]:
    """A row for each field of two configs, in the order of the schema; settings that only one engine has come last.

    Args:
        a: The one.
        b: The other.
        written: What became of each field, where the one was written as the other.
    """
    sides = (_sides(a) | _ranks(a), _sides(b) | _ranks(b))
    for path in dict.fromkeys((*(path for path, _ in leaves(Config) if path != "native"), *sides[0], *sides[1])):
        yield FieldRow(path, sides[0].get(path, _SILENT), sides[1].get(path, _SILENT), (written or {}).get(path))


class Uncompared(NamedTuple):
    """A key of which the fields do not hold all that it says of the training."""

    reading: ReadDocument
    entry: Entry


def uncompared(a: ReadDocument, b: ReadDocument) -> list[Uncompared]:
    """The keys of either config that no field is compared for, but for those that the other has with the same value."""
    beyond = [[entry for entry in reading.entries if _is_beyond(entry)] for reading in (a, b)]
    return [
        Uncompared(reading, entry)
        for reading, own, others in zip((a, b), beyond, reversed(beyond), strict=True)
        for entry in own
        if not any(_is_repeated(entry, other) for other in others)
    ]


def _is_repeated(entry: Entry, other: Entry) -> bool:
    """Whether two keys say the same word for word; one tool hands it on in a block of another's file."""
    short, long = sorted((entry.path, other.path), key=len)
    return long[-len(short) :] == short and bool(entry.value == other.value)


def _is_beyond(entry: Entry) -> bool:
    effect = entry.effect
    match effect.fit:
        case Fit.UNSUPPORTED:
            return True
        case Fit.APPROXIMATE:
            return not effect.native  # settings of an engine are compared themselves
        case Fit.NEEDS_INPUT:
            return not effect.fields and _is_spelled_out(entry)
    return (effect.beyond_fields or effect.unknown) and _is_spelled_out(entry)


def _is_spelled_out(entry: Entry | None) -> bool:
    """Whether a key has a value, which is not left to somebody else."""
    return entry is not None and entry.value not in (None, AUTO, "", [], {}) and not is_placeholder(entry.value)


NOT_SAID = "not said"
_SILENT = Side(None, NOT_SAID, said=False)
_RANKS = "ranks"


def _sides(reading: ReadDocument) -> dict[str, Side]:
    deciders = dict(_deciders(reading))
    sides = {}
    for path, _ in leaves(Config):
        if path == "native":
            continue
        value = value_at(reading.config, path)
        if path in reading.undecided:
            sides[path] = Side(None, reading.undecided[path].who, said=False, entry=deciders.get(path), open=True)
        elif path in reading.decided:
            sides[path] = _decided(value, path, deciders.get(path), reading)
        else:
            sides[path] = Side(value, NOT_SAID, said=False)
    return sides | dict(_native(reading))


def _deciders(reading: ReadDocument) -> Iterator[tuple[str, Entry]]:
    """The entry that decides each field; the first counts, as all that stand agree."""
    for entry in reversed(reading.entries):
        for field in entry.effect.fields:
            yield field, entry


def _decided(value: Any, path: str, entry: Entry | None, reading: ReadDocument) -> Side:
    if entry is None or (path in entry.effect.fields and _listed(entry.effect.fields[path]) != _listed(value)):
        return Side(value, "override", said=True)
    if entry.assumed:
        return Side(
            value,
            "default" if reading.format == "unishard" else f"{reading.format} assumes {entry.key}",
            True,
            entry,
        )
    line = reading.source.origins.of(entry.path).line
    return Side(value, f"{entry.key}, line {line}" if line else entry.key, True, entry)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _native(reading: ReadDocument) -> Iterator[tuple[str, Side]]:
    deciders = {f"native.{key}": entry for entry in reading.entries for key in entry.effect.native}
    for key, value in flat({"native": reading.config.native}):
        if key != "native":
            yield key, _decided(value, key, deciders.get(key), reading)


def _ranks(reading: ReadDocument) -> dict[str, Side]:
    """The number of ranks, which no field holds but some tools' configs do."""
    return {_RANKS: Side(reading.topology.world_size, "ranks that it names", said=True)} if reading.topology else {}
