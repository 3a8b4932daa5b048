"""What a document of another tool says: one `Key` row for each key of its format, and one `Entry` for each key that a
document has.

With the rules of `unishard.contract.rules` these rows describe a format as data: reading, writing, the report and
docs/formats/ all come from them. Engines describe their own arguments so (`EngineArguments.keys`); formats that wrap
an engine's arguments add theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from unishard.config import Config, leaves
from unishard.config.describe import shown
from unishard.config.topology import Topology
from unishard.contract.render import AUTO
from unishard.contract.rules import Fit
from unishard.contract.templates import is_placeholder, is_template_word, placeholders_in

Path = tuple[str, ...]
_LEAVES = frozenset(path for path, _ in leaves(Config))
_MOST_HINTS = 200
"""Unknown keys of a document that get a "did you mean"; comparing a word takes time, and a file with more has no
slips."""


class Unreadable(ValueError):
    """A value that its key cannot have.

    Args:
        message: Begins with "must be" and says what instead.
        value: The value, which may be that of another key.
    """

    def __init__(self, message: str, value: Any = None) -> None:
        super().__init__(message)
        self.value = value


class TemplateWord(Unreadable):
    """A word in capitals in the place of a number or a switch, which a script replaces before the tool reads it."""


class Undecided(NamedTuple):
    """A value that only the training script knows."""

    who: str
    """Who decides it, such as `per_device_train_batch_size of the TrainingArguments`."""
    required: bool = False
    """Whether no tool's default may take its place: only a file that is not there says it."""
    by_ranks: bool = False
    """Whether it follows from the number of ranks, which nothing says."""


class KeyEffect(NamedTuple):
    """The meaning of one key with one value."""

    fit: Fit = Fit.EXACT
    note: str = ""
    fields: Mapping[str, Any] = {}
    """Values of config fields by dotted path; `Undecided` if the script decides."""
    native: Mapping[str, Any] = {}
    """Settings that only one engine has, by dotted key that begins with the engine's name: those of the config's
    `native`. Exact where that engine runs; `fit` and `note` say what is lost where another one does."""
    copy_verbatim: bool = False
    """Whether the key stays where the document is written in its own format for another engine. If unsupported: whether
    its own tool takes it."""
    if_other_engine: Mapping[str, Any] = {}
    """Values of config fields that stand for `native` where another engine runs, whatever other keys say."""
    unknown: bool = False
    """Whether the tool has no such key, so that the document may be another tool's."""
    notable: bool = False
    """Whether the default report has a line for it also where the tool assumes it."""
    decides: tuple[str, ...] = ()
    """If unsupported: the fields that the key decides otherwise. An override of the first decides instead of the
    key."""
    beyond_fields: bool = False
    """Whether the training depends on the value in a way that no field holds: the model and the data that the script
    loads, the operations that `torch.autocast` keeps in fp32."""
    rejected_upstream: bool = False
    """Whether the tool refuses or misreads the key as it stands, so that it goes through in no case."""

    @property
    def sayings(self) -> Mapping[str, Any]:
        """All that it says of the config: the fields, and the settings of an engine below `native`."""
        return {**self.fields, **{f"native.{key}": value for key, value in self.native.items()}}


def left_out(note: str) -> KeyEffect:
    """The effect of a key that says nothing here; it stays where its own tool reads the document again."""
    return KeyEffect(Fit.IGNORED, note, copy_verbatim=True)


class DocumentValues:
    """All values of a document, for keys whose meaning depends on other keys."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], topology: Topology | None) -> None:
        self._values, self._defaults = values, defaults
        self.topology = topology
        """The ranks; None if their number is unknown."""

    def __contains__(self, key: str) -> bool:
        """Whether the document itself has the key."""
        return key in self._values

    def get(self, key: str) -> Any:
        """The value at a dotted key, or the tool's default; None if there is neither."""
        return self._values.get(key, self._defaults.get(key))


NOTHING: Any = object()
"""Marks that there is no default."""

Read = Callable[[Any, DocumentValues], KeyEffect]


class Key(NamedTuple):
    """A key of a format."""

    read: Read
    """Returns the meaning of a value. Raises `Unreadable` for an invalid one."""
    fields: tuple[str, ...] = ()
    """The fields that it decides; `SCRIPT` for something that no field says and the training script must do."""
    fit: Fit = Fit.EXACT
    """What it comes to as a rule, for MAPPING.md."""
    note: str = ""
    tool_default: Any = NOTHING
    """The tool's default if the key is absent, if it must be written to keep the meaning."""


class Entry(NamedTuple):
    """One key of a document, with its value and meaning."""

    path: Path
    value: Any
    effect: KeyEffect
    assumed: bool = False
    """Whether the key is absent from the document and this is the tool's default."""
    place: str = ""
    """Where the value comes from if not from the document, such as `args.yaml:12`."""
    supplied: bool = False
    """Whether the key stands in what `--with` names, not in the document."""
    usual: bool = False
    """Whether the document says what its tool assumes without it."""

    @property
    def key(self) -> str:
        """The path as people write it."""
        return ".".join(self.path)

    @property
    def as_it_is(self) -> str:
        """The name under which `RenderedDocument.fields` says that another document has the key as it is."""
        return f"{'beside' if self.supplied else 'key'}.{self.key}"

    @property
    def refused_by_its_tool(self) -> bool:
        """Whether the tool that reads the document does not take the key."""
        return self.effect.fit is Fit.UNSUPPORTED and not self.effect.copy_verbatim

    @property
    def goes_through(self) -> bool:
        """Whether the key may be repeated as it is."""
        return not (self.refused_by_its_tool or self.effect.rejected_upstream)

    def at(self, *path: str) -> Entry:
        """The same in another place, for a document that wraps another."""
        return self._replace(path=path)

    def but(self, fit: Fit, note: str) -> Entry:
        """The same with another fit; if that is `unsupported`, it sets no fields."""
        refused = fit is Fit.UNSUPPORTED
        fields, native = ({}, {}) if refused else (self.effect.fields, self.effect.native)
        decides = (*self.effect.decides, *self.effect.fields) if refused else ()
        return self._replace(
            effect=self.effect._replace(
                fit=fit,
                note=note,
                fields=fields,
                native=native,
                decides=decides,
                copy_verbatim=self.effect.copy_verbatim and not refused,
            )
        )


def interpret(
    keys: Mapping[str, Key],
    document: Mapping[str, Any],
    *,
    tool: str,
    ignores_unknown: bool | Callable[[str], bool] = False,
    defaults: Mapping[str, Any] | None = None,
    topology: Topology | None = None,
    accepts: Mapping[str, Callable[[Any], Any]] | None = None,
    auto: bool = False,
) -> list[Entry]:
    """Interpret a document: one entry for each of its keys, and one for each default of its tool that must be written.

    Args:
        keys: The rows of the format by dotted key. A mapping whose key has a row, and below which no other row lies, is
            one value.
        document: Nested mappings.
        tool: Who reads such documents, with its version, for messages.
        ignores_unknown: Whether the tool overlooks a key that it does not know (it is dropped then, otherwise refused).
        defaults: What a tool around this one assumes, by dotted key; counts more than `Key.tool_default`.
        topology: The ranks.
        accepts: What the tool itself takes for a key, by dotted key; raises `Unreadable` for a value that it refuses.
            Asked about what is repeated as it is, or handed on, where the tool looks at the value although it means
            nothing here.
        auto: Whether the tool has the word `auto`, as which other keys then see a placeholder such as `${STAGE}`.
    """
    blocks = _blocks(keys)
    values = dict(_values(keys, blocks, document))
    assumed = {key: row.tool_default for key, row in keys.items() if row.tool_default is not NOTHING} | dict(
        defaults or {}
    )
    by_key = {key: value for path, value in values.items() if (key := _key(path))}
    document_values = DocumentValues(
        {
            key: AUTO if auto and (is_placeholder(value) or is_template_word(value)) else value
            for key, value in by_key.items()
        },
        assumed,
        topology,
    )
    entries, unknown = [], 0
    for path, value in values.items():
        key = _key(path)
        if key in keys:
            effect = _check_copied(_read(keys[key], value, document_values), value, tool, (accepts or {}).get(key))
        elif key in blocks:
            effect = _not_a_block(key, value, keys)
        else:
            name = ".".join(path)
            overlooked = ignores_unknown(name) if callable(ignores_unknown) else ignores_unknown
            unknown += 1
            hint = _hint(name, keys) if unknown <= _MOST_HINTS else ""
            effect = _unknown(tool, overlooked, hint)
        entries.append(Entry(path, value, effect, usual=key in assumed and bool(assumed[key] == value)))
    for key, value in assumed.items():
        if key not in document_values and key in keys:
            entries.append(Entry(tuple(key.split(".")), value, _read(keys[key], value, document_values), assumed=True))
    return entries


def _key(path: Path) -> str:
    """The dotted key of a path; empty for one with a dot in a name, which no row has."""
    return "" if any("." in name for name in path) else ".".join(path)


def _blocks(keys: Iterable[str]) -> frozenset[str]:
    """The dotted keys below which rows lie."""
    return frozenset(key[:at] for key in keys for at, character in enumerate(key) if character == ".")


def _values(
    keys: Mapping[str, Key], blocks: Collection[str], document: Mapping[str, Any], above: Path = ()
) -> Iterator[tuple[Path, Any]]:
    for name, value in document.items():
        path = (*above, str(name))
        key = _key(path)
        if isinstance(value, Mapping) and value and (key in blocks or key not in keys):
            yield from _values(keys, blocks, value, path)
        else:
            yield path, value


def _not_a_block(key: str, value: Any, keys: Mapping[str, Key]) -> KeyEffect:
    """The meaning of a key that must be a mapping and is not, or is empty."""
    if value is None or value == {}:
        return left_out("holds nothing")
    below = list(
        dict.fromkeys(other.removeprefix(f"{key}.").partition(".")[0] for other in keys if other.startswith(f"{key}."))
    )
    known = ", ".join(below[:4]) + (", ..." if below[4:] else "")
    return KeyEffect(Fit.UNSUPPORTED, f"must be a mapping of keys ({known}), got {shown(value)}; write them below it")


def _read(row: Key, value: Any, document: DocumentValues) -> KeyEffect:
    try:
        effect = row.read(value, document)
    except Unreadable as error:
        # A key may also depend on another that holds one.
        template_word = (error.value,) if isinstance(error, TemplateWord) else ()
        if placeholders := placeholders_in(value) or placeholders_in(str(error.value)) or template_word:
            return _filled_in(row, placeholders)
        effect = KeyEffect(Fit.UNSUPPORTED, str(error))
    if effect.fit is Fit.UNSUPPORTED and row.fields:
        return effect._replace(decides=row.fields)
    return effect


def _filled_in(row: Key, placeholders: Iterable[str]) -> KeyEffect:
    """The meaning of a value that something else fills in before the tool reads it."""
    who = f"the placeholder {' and '.join(placeholders)}"
    fields = [name for name in row.fields if name in _LEAVES or name.startswith("native.")]
    if not fields:
        return left_out(f"holds {who}, kept as it is")
    return KeyEffect(
        Fit.NEEDS_INPUT, f"the value comes from {who}", dict.fromkeys(fields, Undecided(who)), copy_verbatim=True
    )


def _check_copied(effect: KeyEffect, value: Any, tool: str, accepts: Callable[[Any], Any] | None) -> KeyEffect:
    """Check that the tool accepts a value that is copied unchanged: null is omitted instead, any other value is
    unsupported.
    """
    if accepts is None or effect.fit is Fit.UNSUPPORTED or placeholders_in(value):
        return effect
    effect = effect._replace(rejected_upstream=effect.rejected_upstream or not _accepted(value, accepts))
    if not (effect.copy_verbatim or effect.native):
        return effect
    try:
        for handed_on in effect.native.values() or (value,):
            accepts(handed_on)
    except TemplateWord:
        return effect
    except Unreadable as error:
        if value is None:
            return effect._replace(note=f"null is invalid for {tool} here, so the key is omitted", copy_verbatim=False)
        return KeyEffect(Fit.UNSUPPORTED, str(error), decides=tuple(effect.fields))
    return effect


def _accepted(value: Any, accepts: Callable[[Any], Any]) -> bool:
    try:
        accepts(value)
    except Unreadable as error:
        return isinstance(error, TemplateWord)
    return True


def _hint(key: str, keys: Mapping[str, Key]) -> str:
    where, _, name = key.rpartition(".")
    beside = [other.rpartition(".")[2] for other in keys if other.rpartition(".")[0] == where]
    nested_there = [other for other in keys if other.endswith(f".{key}")]
    elsewhere = nested_there or [other for other in keys if other.rpartition(".")[2] == name]
    meant = get_close_matches(name, beside, 1, 0.75) or elsewhere
    return f"; did you mean {meant[0]!r}?" if meant else ""


def _unknown(tool: str, overlooked: bool, hint: str) -> KeyEffect:
    if overlooked:
        return KeyEffect(
            Fit.IGNORED, f"{tool} does not know this key and ignores it{hint}", copy_verbatim=True, unknown=True
        )
    return KeyEffect(Fit.UNSUPPORTED, f"{tool} does not know this key{hint or '; remove it'}", unknown=True)
