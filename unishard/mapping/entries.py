"""Two kinds of rows, with which a format of another tool is described as data.

`Key`: what a key of that format says in the config's words. `Expression`: how that format says a field of the config. Reading, writing,
the report and MAPPING.md all come from these rows. Engines describe their own arguments with them (`Backend.keys`, `Backend.expressions`);
document formats that wrap an engine's arguments add theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, NamedTuple

from unishard.config import Config
from unishard.config.describe import shown
from unishard.config.topology import Topology
from unishard.mapping.rules import Fit, Native, flat, merge, nested

__all__ = [
    "AUTO",
    "KEPT_AUTO",
    "LEFT_OUT",
    "NOTHING",
    "NO_KEY",
    "SCRIPT",
    "Case",
    "Entry",
    "Expressed",
    "Expression",
    "Given",
    "Holds",
    "Key",
    "Meaning",
    "Path",
    "Setting",
    "Undecided",
    "Unreadable",
    "Verdict",
    "Word",
    "express",
    "interpret",
]

Path = tuple[str, ...]
AUTO = "auto"
NO_KEY = "none"
"""Stands, among a format's keys, where it has none for a field."""
SCRIPT = "your training script"
"""Stands there where the format has none and the script must do it."""


class Verdict(StrEnum):
    """What became of a key. In order: of several, the last counts."""

    EXACT = "exact"
    """It means the same there."""
    EMULATED = "emulated"
    """Same maths to rounding; by other collectives or memory, or unishard's loop does it around the engine."""
    APPROXIMATE = "approximate"
    """Same purpose, another trade-off; the note says how it differs. An error under `--strict`."""
    DROPPED = "dropped"
    """Left out, and nothing is lost: it concerns a launcher, a log, time or memory alone, or is off."""
    UNDECIDED = "undecided"
    """Needs your decision: only the training script knows it, or must do it."""
    REFUSED = "refused"
    """Cannot be had; the note says why, and what instead."""

    @classmethod
    def of(cls, fit: Fit) -> Verdict:
        """That of a backend's rule."""
        return _OF_FIT[fit]

    @property
    def badness(self) -> int:
        """Position in the order."""
        return list(Verdict).index(self)


_OF_FIT = {
    Fit.EXACT: Verdict.EXACT,
    Fit.EQUIVALENT: Verdict.EMULATED,
    Fit.APPROXIMATE: Verdict.APPROXIMATE,
    Fit.UNSUPPORTED: Verdict.REFUSED,
}


class Unreadable(ValueError):
    """A value that its key cannot have. The message begins with "must be" and says what instead."""


class Undecided(NamedTuple):
    """Stands for a value that only the training script knows."""

    who: str
    """Who decides it, such as `per_device_train_batch_size of the TrainingArguments`."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What one key with one value says."""

    verdict: Verdict = Verdict.EXACT
    note: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields of the config by dotted path; `Undecided` where the script decides."""
    native: Mapping[str, Any] = field(default_factory=dict)
    """Settings that only one engine has, by dotted key that begins with the engine's name: those of the config's `native`. Exact where
    that engine runs; `verdict` and `note` say what is lost where another one does."""
    kept: bool = False
    """Whether the key is repeated as it is when the document is written in its own format again, because it concerns nothing else."""


class Given:
    """All that a document says, for keys whose meaning depends on others."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], topology: Topology | None) -> None:
        self._values, self._defaults = values, defaults
        self.topology = topology
        """The ranks; None where nobody has said how many."""

    def __contains__(self, key: str) -> bool:
        """Whether the document itself has the key."""
        return key in self._values

    def get(self, key: str) -> Any:
        """The value at a dotted key, or what the tool assumes where the document is silent; None where it assumes nothing."""
        return self._values.get(key, self._defaults.get(key))


NOTHING: Any = object()
"""Stands for no default."""

Read = Callable[[Any, Given], Meaning]


@dataclass(frozen=True, slots=True)
class Key:
    """A key that a format has."""

    read: Read
    """What a value means. Raises `Unreadable` for one that the key cannot have."""
    fields: str = ""
    """The fields that it decides, in words, for MAPPING.md; empty for none."""
    verdict: Verdict = Verdict.EXACT
    """What it comes to as a rule, for MAPPING.md."""
    note: str = ""
    silent: Any = NOTHING
    """The value that the tool assumes where a document does not have the key, if that must be said to keep its meaning."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a document says at one place."""

    path: Path
    value: Any
    meaning: Meaning
    assumed: bool = False
    """Whether the document does not have the key, and its tool assumes this value."""

    @property
    def key(self) -> str:
        """The path as people write it."""
        return ".".join(self.path)

    def at(self, *path: str) -> Entry:
        """The same in another place, for a document that wraps another."""
        return replace(self, path=path)

    def but(self, verdict: Verdict, note: str) -> Entry:
        """The same with another verdict, deciding nothing any more if it is refused."""
        refused = verdict is Verdict.REFUSED
        fields, native = ({}, {}) if refused else (self.meaning.fields, self.meaning.native)
        return replace(self, meaning=replace(self.meaning, verdict=verdict, note=note, fields=fields, native=native))


def interpret(
    keys: Mapping[str, Key],
    document: Mapping[str, Any],
    *,
    tool: str,
    ignores_unknown: bool | Callable[[str], bool] = False,
    defaults: Mapping[str, Any] | None = None,
    topology: Topology | None = None,
    accepts: Mapping[str, Callable[[Any], Any]] | None = None,
) -> list[Entry]:
    """What a document says, one entry for each of its keys, and one for each default of its tool that must be said.

    Args:
        keys: The rows of the format by dotted key. A mapping whose key has a row, and below which no other row lies, is one value.
        document: Nested mappings.
        tool: Who reads such documents, with its version, for messages.
        ignores_unknown: Whether the tool overlooks a key that it does not know (it is dropped then, otherwise refused).
        defaults: What a tool around this one assumes, by dotted key; counts more than `Key.silent`.
        topology: The ranks.
        accepts: What the tool itself takes for a key, by dotted key; raises `Unreadable` for a value that it refuses. Asked about what is
            repeated as it is, or handed on, where the tool looks at the value although it means nothing here.
    """
    blocks = _blocks(keys)
    values = dict(_values(keys, blocks, document))
    assumed = {key: row.silent for key, row in keys.items() if row.silent is not NOTHING} | dict(defaults or {})
    given = Given({key: value for path, value in values.items() if (key := _key(path))}, assumed, topology)
    entries = []
    for path, value in values.items():
        key = _key(path)
        if key in keys:
            meaning = _taken(_read(keys[key], value, given), value, tool, (accepts or {}).get(key))
        elif key in blocks:
            meaning = _not_a_block(key, value, keys)
        else:
            name = ".".join(path)
            overlooked = ignores_unknown(name) if callable(ignores_unknown) else ignores_unknown
            meaning = _unknown(name, keys, tool, overlooked)
        entries.append(Entry(path, value, meaning))
    for key, value in assumed.items():
        if key not in given and key in keys:
            entries.append(Entry(tuple(key.split(".")), value, _read(keys[key], value, given), assumed=True))
    return entries


def _key(path: Path) -> str:
    """The dotted key of a path; empty for one with a dot in a name, which no row has."""
    return "" if any("." in name for name in path) else ".".join(path)


def _blocks(keys: Iterable[str]) -> frozenset[str]:
    """The dotted keys below which rows lie."""
    return frozenset(key[:at] for key in keys for at, character in enumerate(key) if character == ".")


def _values(keys: Mapping[str, Key], blocks: Collection[str], document: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    for name, value in document.items():
        path = (*above, str(name))
        key = _key(path)
        if isinstance(value, Mapping) and value and (key in blocks or key not in keys):
            yield from _values(keys, blocks, value, path)
        else:
            yield path, value


def _not_a_block(key: str, value: Any, keys: Mapping[str, Key]) -> Meaning:
    """What is said by a key below which others belong, and where there are none."""
    if value is None or value == {}:
        return Meaning(Verdict.DROPPED, "holds nothing", kept=True)
    below = list(dict.fromkeys(other.removeprefix(f"{key}.").partition(".")[0] for other in keys if other.startswith(f"{key}.")))
    known = ", ".join(below[:4]) + (", ..." if below[4:] else "")
    return Meaning(Verdict.REFUSED, f"must be a mapping of keys ({known}), got {shown(value)}; write them below it")


def _read(row: Key, value: Any, given: Given) -> Meaning:
    try:
        return row.read(value, given)
    except Unreadable as error:
        return Meaning(Verdict.REFUSED, str(error))


def _taken(meaning: Meaning, value: Any, tool: str, accepts: Callable[[Any], Any] | None) -> Meaning:
    """The meaning, refused where the tool would not take back what is repeated; null, which says nothing, is left out instead."""
    if accepts is None or meaning.verdict is Verdict.REFUSED or not (meaning.kept or meaning.native):
        return meaning
    try:
        for handed_on in meaning.native.values() or (value,):
            accepts(handed_on)
    except Unreadable as error:
        if value is None:
            return replace(meaning, note=f"is null, which {tool} refuses here, so it is left out", kept=False)
        return Meaning(Verdict.REFUSED, str(error))
    return meaning


def _unknown(key: str, keys: Mapping[str, Key], tool: str, overlooked: bool) -> Meaning:
    where, _, name = key.rpartition(".")
    beside = [other.rpartition(".")[2] for other in keys if other.rpartition(".")[0] == where]
    near = get_close_matches(name, beside, 1, 0.75)
    nested_there = [other for other in keys if other.endswith(f".{key}")]
    elsewhere = nested_there or [other for other in keys if other.rpartition(".")[2] == name]
    hint = f"; did you mean {near[0]!r}?" if near else f"; did you mean {elsewhere[0]!r}?" if elsewhere else ""
    if overlooked:
        return Meaning(Verdict.DROPPED, f"{tool} does not know this key and ignores it{hint}", kept=True)
    return Meaning(Verdict.REFUSED, f"{tool} does not know this key{hint or '; remove it'}")


Setting = Callable[[Config, Topology], Native]
Holds = Callable[[Config], bool]


@dataclass(frozen=True, slots=True)
class Case:
    """A case in which a field is expressed differently."""

    case: str
    """The condition in words, for MAPPING.md."""
    holds: Holds
    verdict: Verdict
    note: str


@dataclass(frozen=True, slots=True)
class Expression:
    """How a format says one field of the config."""

    verdict: Verdict
    key: str
    """The format's keys, in words; `your training script` where the script must do it, and `NO_KEY` where nothing does."""
    note: str = ""
    to: Setting = lambda cfg, topology: {}
    """The nested fragment of the document that says it; fragments are merged."""
    when: tuple[Case, ...] = ()
    """Exceptions, the first that holds counts."""
    auto: bool = False
    """Whether the format has the word `auto` for a value that the training script decides; otherwise such a value is left out."""


class Word(NamedTuple):
    """What became of one field in a format."""

    verdict: Verdict
    key: str
    note: str


class Expressed(NamedTuple):
    """A config in the words of a format."""

    document: Native
    words: Mapping[str, Word]
    """By field."""


"""The note of a value that is written as `AUTO`."""
LEFT_OUT = "left out, which leaves it to the tool's default; write the value here"
"""The note of an undecided value for which a format has a key but no word."""
KEPT_AUTO = 'kept as "auto", which transformers and Accelerate fill in from the training script; write the value for anything else'


def express(expressions: Mapping[str, Expression], cfg: Config, topology: Topology, undecided: Collection[str] = frozenset()) -> Expressed:
    """What a format's rows make of a config. Pure.

    Args:
        expressions: One row for each leaf of `Config`.
        cfg: What to say.
        topology: The ranks.
        undecided: Fields whose value in `cfg` only fills the place of one that the training script decides.
    """
    document: Native = {}
    words = {}
    for path, row in expressions.items():
        fragment, words[path] = _said(row, cfg, topology, undecided=path in undecided)
        document = merge(document, fragment)
    return Expressed(document, words)


def _said(row: Expression, cfg: Config, topology: Topology, *, undecided: bool) -> tuple[Native, Word]:
    if undecided and row.auto:
        fragment = nested(dict.fromkeys(dict(flat(row.to(cfg, topology))), AUTO))
        return fragment, Word(Verdict.UNDECIDED, row.key, KEPT_AUTO)
    if undecided:
        return {}, _left_out(row)
    case = next((case for case in row.when if case.holds(cfg)), None)
    verdict, note = (case.verdict, case.note) if case else (row.verdict, row.note)
    refused = verdict in (Verdict.REFUSED, Verdict.UNDECIDED)
    return ({} if refused else row.to(cfg, topology)), Word(verdict, row.key, note)


def _left_out(row: Expression) -> Word:
    """What becomes of a field that is not written, because only the training script knows its value."""
    match row.verdict:
        case Verdict.UNDECIDED:
            return Word(Verdict.EXACT, row.key, "goes on deciding it")
        case Verdict.DROPPED:
            return Word(row.verdict, row.key, row.note)
    return Word(Verdict.UNDECIDED, row.key, LEFT_OUT)
