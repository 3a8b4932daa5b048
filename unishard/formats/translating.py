"""From a document in one format to a document in another, with one line for each key of the first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from unishard.config import Config, leaves, value_at
from unishard.config.describe import shown
from unishard.config.nested import Native, flat, merge
from unishard.config.topology import Topology
from unishard.errors import BackendError, ConfigError, Problem
from unishard.formats import catalog
from unishard.formats.defaults import left_to_engine, stays_with_engine
from unishard.formats.dropping import DroppedKey, check_used, drop_entries, drop_keys
from unishard.formats.format import Format
from unishard.formats.readback import Change, changes, differences, read_back, refusals, to_write_out, with_differences
from unishard.formats.reading import ReadDocument, assemble, default_of
from unishard.formats.saves import carried, described, with_files
from unishard.formats.source import Source, open_source
from unishard.formats.untouched import goes_through, stays, untouched, value_in
from unishard.loading.document import text_of
from unishard.loading.placeholders import placeholder
from unishard.mapping.entries import Entry
from unishard.mapping.express import KEPT_AUTO, LEFT_OUT, Expressed, FieldResult
from unishard.mapping.rules import NO_KEY, Fit

if TYPE_CHECKING:
    from unishard.formats.filling import Filling

__all__ = ["Item", "Outcome", "read", "translate"]


class Item(NamedTuple):
    """What became of one key."""

    key: str
    value: Any
    fit: Fit
    becomes: str
    """What says it in the other format, in words; empty where nothing does."""
    note: str
    line: int | None
    """Of the key in its file."""
    assumed: bool
    """Whether the document does not have the key, and its tool assumes this value."""
    notable: bool = False
    """Whether the default report has a line for it although it is assumed."""
    place: str = ""
    """Where the value comes from if not from the document: what was read beside it, or the default of that."""
    beside: bool = False
    """Whether the key is one of what was read beside the document."""


class Outcome(NamedTuple):
    """A translated document, and what became of each key."""

    reading: ReadDocument
    to: str
    """The format."""
    items: tuple[Item, ...]
    document: Native
    text: str
    """The document as a file holds it."""
    warnings: tuple[str, ...]
    launch: str = ""
    """The torchrun line for the processes that the source asks for, where the other format does not say it; empty where there is none."""
    dropped: tuple[DroppedKey, ...] = ()
    """What was left out on request."""
    filling: Filling | None = None
    """What was read beside the document."""
    changes: tuple[Change, ...] = ()
    """What the translation means otherwise, though no item says so."""

    def of(self, fit: Fit) -> list[Item]:
        """The items with this fit."""
        return [item for item in self.items if item.fit is fit]

    def status(self, *, strict: bool) -> int:
        """Exit status: 1 if something is refused, 2 if something is approximate under `strict`, else 0."""
        if self.of(Fit.UNSUPPORTED):
            return 1
        changed = self.of(Fit.APPROXIMATE) or any(change.said for change in self.changes)
        return 2 if strict and changed else 0


def read(
    source: str | Path | Mapping[str, Any] | Source,
    from_: str | None = None,
    overrides: Iterable[str] = (),
    topology: Topology | None = None,
) -> ReadDocument:
    """What a config of any tool says.

    Args:
        source: Path of a YAML, JSON or TOML file, or what one would hold, or a file that is open already.
        from_: Name of its format; left out, it is recognised from its keys.
        overrides: Changes on top, such as `training.micro_batch_size=4`.
        topology: The ranks; left out, those that the document speaks of.

    Raises:
        ConfigError: The file cannot be read, is in no known format, or an override cannot be used.
    """
    opened = open_source(source)
    format_ = catalog.get(from_) if from_ else catalog.recognise(opened)
    return format_.read(opened, tuple(overrides), topology)


def translate(
    source: str | Path | Mapping[str, Any] | Source,
    to: str,
    *,
    from_: str | None = None,
    overrides: Iterable[str] = (),
    topology: Topology | None = None,
    drop: Iterable[str] = (),
    with_: str | Path | Sequence[str] | None = None,
) -> Outcome:
    """Translate a config of any tool into the format of another. Imports neither torch nor an engine.

    Args:
        source: Path of a YAML, JSON or TOML file, or what one would hold, or a file that is open already.
        to: Name of the format to write.
        from_: Name of the source's format; left out, it is recognised from its keys.
        overrides: Changes on top, such as `backend=fsdp`; they also decide what only the training script knows.
        topology: The ranks; left out, those that the document speaks of, or one.
        drop: Keys to leave out, as dotted names or globs; the document then means what it means without them.
        with_: What fills the values that the document leaves open: a launch script, a file of TrainingArguments or of Accelerate, or the
            words of a command line.

    Returns:
        The document and one item for each key of the source. What is not supported stands among the items as refused.

    Raises:
        ConfigError: The file cannot be read, is in no known format, an override cannot be used, or a key to drop is not there.
    """
    target, overrides, drop = catalog.get(to), tuple(overrides), tuple(drop)
    source = open_source(source)
    reading, dropped = _read_without(source, from_, overrides, topology, drop)
    filling = None
    if with_ is not None:
        from unishard.formats.filling import filled  # few translations need it

        left = [pattern for pattern in drop if pattern not in {one.pattern for one in dropped}]
        reading, filling, further = filled(reading, with_, overrides=overrides, topology=topology, to=to, drop=left)
        dropped += further
    check_used(drop, dropped, source)
    ranks = topology or reading.topology or Topology()
    expressed = _written(target, reading, ranks)
    yielding = _without_refused_assumptions(reading, expressed)
    if yielding:
        reading = assemble(
            reading.format, reading.source, yielding, overrides=overrides, topology=reading.topology, fills_auto=reading.fills_auto
        )
        expressed = _written(target, reading, ranks)
    same = _same(target, reading, expressed)
    items, document = _described(target, reading, expressed, same, overrides)
    warnings = [*reading.source.warnings, *filter(None, [getattr(target, "notice", "")])]
    found: tuple[Change, ...] = ()
    back = _read_back(target, document, reading, items, warnings)
    if back and same is None and (silent := to_write_out(differences(reading, back), reading)):
        expressed = _written(target, reading._replace(decided=reading.decided | silent), ranks)
        items, document = _described(target, reading, expressed, same, overrides)
        back = _read_back(target, document, reading, items, warnings)
    if back:
        different = differences(reading, back)
        items = tuple(with_differences(items, different, reading, back, expressed.fields))
        found = changes(different, reading, back, items)
        warnings += [*refusals(back, target.tool), *filter(None, [getattr(target, "wants", _nothing)(document)])]
    text = target.render(document, reading) if dropped or same is None else _text(target, document, reading)
    launch = _launch(reading, to) or (filling.launch.torchrun() if filling else "")
    return Outcome(reading, to, items, document, text, tuple(warnings), launch, tuple(dropped), filling, found)


def _read_back(
    target: Format, document: Native, reading: ReadDocument, items: tuple[Item, ...], warnings: list[str]
) -> ReadDocument | None:
    """What a document means that may be written; None, and a warning, where its own tool would not read it as it stands."""
    if any(item.fit is Fit.UNSUPPORTED for item in items):
        return None
    try:
        return read_back(target, document, reading)
    except ConfigError as error:
        warnings.append(f"not compared with its source: {error}")
        return None


def _described(
    target: Format, reading: ReadDocument, expressed: Expressed, same: Native | None, overrides: tuple[str, ...]
) -> tuple[tuple[Item, ...], Native]:
    """One item for each key, and the document."""
    found = carried(reading, target.name)
    lines = (described(_item(entry, reading, target, expressed, same), entry, found, target.name) for entry in reading.entries)
    items = (*lines, *_refused_overrides(overrides, reading, expressed))
    if same is not None:
        return items, same
    return items, with_files(merge(expressed.document, _kept_keys(reading) if reading.format == target.name else {}), found.values())


def _nothing(document: Native) -> str:
    return ""


def _launch(reading: ReadDocument, to: str) -> str:
    launch = getattr(catalog.get(reading.format), "launch", None)
    return launch(reading).torchrun() if launch and reading.format != to else ""


def _read_without(
    source: Source, from_: str | None, overrides: tuple[str, ...], topology: Topology | None, drop: tuple[str, ...]
) -> tuple[ReadDocument, list[DroppedKey]]:
    """What a document says without the keys to drop. They count for its format, and for nothing else."""
    format_ = catalog.get(from_) if from_ else catalog.recognise(source)
    source, dropped = drop_keys(source, drop)
    reading = format_.read(source, overrides, topology)
    if not drop:
        return reading, dropped
    entries, further = drop_entries(reading.entries, drop)
    if further:
        reading = assemble(reading.format, source, entries, overrides=overrides, topology=reading.topology, fills_auto=reading.fills_auto)
    return reading, [*dropped, *further]


def _same(target: Format, reading: ReadDocument, expressed: Expressed) -> Native | None:
    """The source with what overrides change, if it is in this format already. unishard's own files are edited with `unishard set`."""
    if reading.format != target.name or target.name == "unishard":
        return None
    return untouched(target, reading, expressed, lambda plain: _written(target, plain, plain.topology or Topology()).document)


def _text(target: Format, document: Native, reading: ReadDocument) -> str:
    """The document as a file; one that does not change keeps every character."""
    if reading.format == target.name and reading.source.folder is not None and document == reading.source.data:
        return text_of(Path(reading.source.name))
    return target.render(document, reading)


def _written(target: Format, reading: ReadDocument, ranks: Topology) -> Expressed:
    try:
        return target.write(reading, ranks)
    except BackendError as error:
        raise ConfigError([Problem("backend", str(error), reading.source.name)]) from None


def _without_refused_assumptions(reading: ReadDocument, expressed: Expressed) -> list[Entry]:
    """The entries, if there are assumed ones that are not supported: those then say only how the schema's default differs.

    Nobody asked for what a tool assumes where its file is silent, so it is no reason to refuse the file.
    """
    entries = [_without_refused(entry, reading, expressed) if entry.assumed else entry for entry in reading.entries]
    return entries if any(new is not old for new, old in zip(entries, reading.entries, strict=True)) else []


def _without_refused(entry: Entry, reading: ReadDocument, expressed: Expressed) -> Entry:
    refused = [field for field in entry.meaning.fields if field in expressed.fields and expressed.fields[field].fit is Fit.UNSUPPORTED]
    if not refused or any(field in reading.undecided for field in refused):
        return entry
    said = {field: entry.meaning.fields[field] for field in refused}
    values = {field: value_at(reading.config, field) for field, _ in leaves(Config)}
    note = "; ".join(
        f"{reading.format} has {shown(value)} here, which is not supported ({expressed.fields[field].note}); "
        f"{field} is {shown(default_of(field, values))}"
        for field, value in said.items()
    )
    fields = {field: value for field, value in entry.meaning.fields.items() if field not in said}
    return entry._replace(meaning=entry.meaning._replace(fit=Fit.APPROXIMATE, note=note, fields=fields))


def _kept_keys(reading: ReadDocument) -> Native:
    """The keys that concern nothing but the document's own tool."""
    kept: Native = {}
    for entry in reading.entries:
        if entry.meaning.kept and not entry.assumed:
            value = entry.value
            for name in reversed(entry.path):
                value = {name: value}
            kept = merge(kept, value)
    return kept


def _refused_overrides(overrides: Iterable[str], reading: ReadDocument, expressed: Expressed) -> Iterator[Item]:
    """Overrides that are not supported, of fields that no key of the document decides."""
    said = {field for entry in reading.entries for field in entry.meaning.fields}
    for text in overrides:
        field = text.partition("=")[0].strip()
        result = expressed.fields.get(field)
        if result and result.fit is Fit.UNSUPPORTED and field not in said:
            yield Item(f"--set {field}", value_at(reading.config, field), result.fit, result.key, result.note, None, assumed=False)


def _item(entry: Entry, reading: ReadDocument, target: Format, expressed: Expressed, same: Native | None) -> Item:
    word = _repeated(entry, reading, same) if same is not None and not entry.beside else None
    word = word or _unless_left(_result(entry, reading, target, expressed), entry, reading, target, expressed)
    line = None if entry.assumed or entry.beside else reading.source.origins.of(entry.path).line
    notable = entry.assumed and entry.meaning.notable
    return Item(entry.key, entry.value, word.fit, word.key, word.note, line, entry.assumed, notable, entry.place, entry.beside)


def _repeated(entry: Entry, reading: ReadDocument, same: Native) -> FieldResult | None:
    """What became of a key that the same format has as it is, or of a default that still holds; None where it does not stay so."""
    meaning = entry.meaning
    here = not entry.assumed and stays(entry, reading.source.data, same)
    elsewhere = any(key.partition(".")[0] != reading.config.backend for key in meaning.native)
    if not goes_through(entry) or elsewhere or (not entry.assumed and not here):
        return None
    if meaning.fit is Fit.NEEDS_INPUT or (entry.assumed and any(field in reading.undecided for field in meaning.fields)):
        return FieldResult(Fit.EXACT, entry.key, "kept") if here and any(_required(reading, meaning.fields)) else None
    if not entry.assumed:
        return FieldResult(Fit.EXACT, entry.key, "kept")
    values = ((value_at(reading.config, field), value) for field, value in meaning.fields.items())
    holds = all(list(held) == list(value) if isinstance(held, tuple) else held == value for held, value in values)
    left = f"{meaning.note}; still left to it" if meaning.notable else "still left to the tool's default"
    return FieldResult(Fit.EXACT, "", left) if holds and value_in(same, entry.path) is None else None


def _unless_left(word: FieldResult, entry: Entry, reading: ReadDocument, target: Format, expressed: Expressed) -> FieldResult:
    """The result, which is exact for a default of the engine or a setting without a field where another tool drives the same engine."""
    if target.name == "unishard" or word.fit not in (Fit.EQUIVALENT, Fit.APPROXIMATE) or not stays_with_engine(reading):
        return word
    if (entry.meaning.fields and not entry.assumed) or not left_to_engine(entry, expressed.document):
        return word
    return FieldResult(Fit.EXACT, "" if entry.assumed else entry.key, "the same default there" if entry.assumed else "")


def _required(reading: ReadDocument, fields: Iterable[str]) -> Iterator[bool]:
    """Whether each field is one that no default may decide, and that another format would have to be told."""
    return (reading.undecided[field].required for field in fields if field in reading.undecided)


def _result(entry: Entry, reading: ReadDocument, target: Format, expressed: Expressed) -> FieldResult:
    meaning = entry.meaning
    if meaning.fit is Fit.UNSUPPORTED:
        return FieldResult(Fit.UNSUPPORTED, "", meaning.note)
    if meaning.kept and reading.format == target.name and meaning.fields.keys() <= reading.undecided.keys():
        return FieldResult(Fit.EXACT, entry.key, "kept")
    own = _native_result(entry, reading, expressed) if meaning.native else None
    if not meaning.fields:
        return own or FieldResult(meaning.fit, "", meaning.note)
    if own is None:
        word = _field_result(entry, reading, expressed)
        silent = entry.assumed and reading.format == target.name and word.note.endswith(LEFT_OUT)
        left = f"{meaning.note}; still left to it" if meaning.notable else "still left to the tool's default"
        return FieldResult(Fit.EXACT, "", left) if silent else word
    said = _field_result(entry.but(Fit.EXACT, ""), reading, expressed)
    becomes, note = (", ".join(filter(None, (said.key, own.key))), "; ".join(filter(None, (said.note, own.note))))
    return FieldResult(max(said.fit, own.fit, key=lambda fit: fit.badness), becomes, note)


def _native_result(entry: Entry, reading: ReadDocument, expressed: Expressed) -> FieldResult:
    """What became of settings that only one engine has: exact where the document that is written holds them, or says that it does."""
    words = [_native_setting(path, reading, expressed) for path in entry.meaning.native]
    said = max(words, key=lambda word: word.fit.badness)
    if said.fit is Fit.EXACT:
        return FieldResult(Fit.EXACT, ", ".join(word.key for word in words), "")
    # What is lost where the setting is dropped, the key itself says.
    own = entry.meaning.fit
    fit = own if said.fit is Fit.IGNORED else max(own, said.fit, key=lambda fit: fit.badness)
    return FieldResult(fit, "", "; ".join(dict.fromkeys(filter(None, (entry.meaning.note, said.note)))))


def _native_setting(path: str, reading: ReadDocument, expressed: Expressed) -> FieldResult:
    engine, _, key = path.partition(".")
    if engine != reading.config.backend:
        return FieldResult(Fit.IGNORED, "", "")
    if said := expressed.fields.get(f"native.{path}"):
        return said
    held = [name for name, _ in flat(expressed.document) if f".{key}." in f".{name}."]
    return FieldResult(Fit.EXACT, min(held, key=len), "") if held else FieldResult(Fit.IGNORED, "", "")


_SAID = FieldResult(Fit.EXACT, "", "")


def _left_to_the_tool(field: str, expressed: Expressed) -> bool:
    """Whether a document says nothing of an undecided field: neither `auto` nor a placeholder."""
    word = expressed.fields.get(field, _SAID)
    return word.fit is Fit.NEEDS_INPUT and word.note != KEPT_AUTO and placeholder(field) not in dict(flat(expressed.document)).values()


def _unknown(fields: list[str], reading: ReadDocument) -> FieldResult:
    """The outcome of a key with unknown fields that the other format cannot leave open: its tool's defaults would train differently."""
    who = reading.undecided[fields[0]].who
    note = f"{who}, says {', '.join(fields)}; add it, or {' '.join(f'--set {field}=...' for field in fields)}"
    return FieldResult(Fit.UNSUPPORTED, "", note)


def _field_result(entry: Entry, reading: ReadDocument, expressed: Expressed) -> FieldResult:
    """Of what the key means and what the other format makes of it, the worse."""
    own = entry.meaning
    left = [field for field in own.fields if field in reading.undecided]
    if missing := [field for field in left if reading.undecided[field].required and _left_to_the_tool(field, expressed)]:
        return _unknown(missing, reading)
    words = [expressed.fields[field] for field in own.fields if field in expressed.fields]
    said = max((word.fit for word in words), key=lambda fit: fit.badness, default=Fit.EXACT)
    fit, notes = max(own.fit, said, key=lambda fit: fit.badness), [own.note] if own.fit is not Fit.EXACT or own.notable else []
    if own.fit is Fit.NEEDS_INPUT:
        # Whether it must be decided now is the other format's to say.
        fit, notes = said, notes if left and said is Fit.NEEDS_INPUT else []
    elif said is Fit.NEEDS_INPUT:
        notes += [f"{field} comes from {reading.undecided[field].who}" for field in left]
    notes += [word.note for word in words if word.note and word.fit is not Fit.EXACT] if said is not Fit.EXACT else []
    becomes = ", ".join(dict.fromkeys(word.key for word in words if word.key not in ("", NO_KEY)))
    return FieldResult(fit, becomes, "; ".join(dict.fromkeys(filter(None, notes))))
