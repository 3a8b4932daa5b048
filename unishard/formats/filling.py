"""Which of the values that are read beside a document count: those that it leaves open, and none that it decides."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from unishard.config import Config, leaves
from unishard.config.describe import shown
from unishard.config.nested import is_within
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, KeyEffect, Path, Undecided
from unishard.contract.render import AUTO
from unishard.contract.rules import Fit
from unishard.errors import ConfigError, Problem
from unishard.formats import catalog, launcher_config
from unishard.formats.dropping import DroppedKey, drop_entries
from unishard.formats.engine_choice import RECIPES, engine_is_open
from unishard.formats.format import Format
from unishard.formats.launching import Launch
from unishard.formats.reading import ReadDocument, assemble
from unishard.formats.supplied import Supplied, open_supplied, trainer

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
        if not entry.effect.fields and entry.effect.notable and not entry.assumed:
            yield entry._replace(effect=KeyEffect(entry.effect.fit, entry.effect.note))
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


_ENGINES = ("deepspeed", "fsdp", "fsdp_config")
"""Arguments in which a script names the engine's config, which is the document itself."""
_FIELDS = frozenset(path for path, _ in leaves(Config))
_BATCH, _WHOLE = "train_batch_size", "training.global_batch_size"
_FACTORS = ("training.micro_batch_size", "training.gradient_accumulation_steps")
_STRATEGY = ("backend", "sharding.", "offload.")
_OF_LAUNCHER = ("precision.compute", "training.gradient_accumulation_steps", "training.gradient_clipping")
"""What a config of Accelerate says about the loop, whatever engine it drives; it also says how processes start."""


def filled(
    reading: ReadDocument,
    with_: str | FilePath,
    *,
    overrides: Iterable[str],
    topology: Topology | None,
    to: str,
    drop: Iterable[str],
) -> tuple[ReadDocument, Supplied, list[DroppedKey]]:
    """The reading with the values that are supplied where the document leaves them open.

    What the document decides stays; an argument that says otherwise is refused, as transformers refuses it.

    Args:
        reading: What the document says.
        with_: What is read beside it: a file, or the command that trains.
        overrides: Changes on top, which count more than either.
        topology: The ranks that were asked for.
        to: The format to write. In the document's own, only its open keys are filled.
        drop: Arguments to leave out, as names or globs.

    Returns:
        The reading, what was read beside it, and what was left out on request.

    Raises:
        ConfigError: What is beside it cannot be read, or both name a number of ranks, and not the same.
    """
    drop, overrides = tuple(drop), tuple(overrides)
    format_, same = catalog.get(reading.format), reading.format == to
    beside, dropped = _with_recipe(open_supplied(with_, reading.source.folder), reading).without(drop)
    ranks = topology or _one_of(format_.ranks(reading.source), beside.topology, reading, beside) or reading.topology
    if reading.format == "accelerate":
        beside = beside._replace(values={key: beside.values[key] for key in beside.values if key not in beside.options})
    if beside.format == "deepspeed" and not engine_is_open(reading.entries):
        what = "is a config of DeepSpeed, for TrainingArguments that name no engine; give --with what the script gets"
        raise ConfigError([Problem("", what, beside.name)])
    if reading.format in RECIPES and beside.format not in RECIPES:
        beside = beside._replace(values={} if beside.format == "accelerate" else beside.values, format=reading.format)
    told = beside._replace(topology=ranks)
    own, given = (
        _merged(reading, format_, told, same=same)
        if reading.format in RECIPES
        else _beside(reading, format_, told, same=same)
    )
    unknown = tuple(dict.fromkeys(entry.key for entry in given if entry.effect.unknown))
    own = _opened(own, given)
    given += [] if same else beside.started
    noted: list[Entry] = []
    if reading.format == "accelerate" and same:
        noted = list(launcher_config.staying_options(reading, beside))
    if reading.format in RECIPES and engine_is_open(own):
        if same:
            noted = launcher_config.staying(beside)
        else:
            own = launcher_config.decided(own, given, beside, ranks, reading)
    entries = [*own, *fills(own, given, reading, _changed(overrides), same=same), *noted]
    entries, further = drop_entries(_with_whole_batch(entries, ranks), drop)
    complete = assemble(
        reading.format, reading.source, entries, overrides=overrides, topology=ranks, fills_auto=reading.fills_auto
    )
    launch = Launch() if same and beside.launcher else beside.launch  # which keeps the engine; torchrun would lose it
    return complete, beside._replace(unknown=unknown, launch=launch), [*dropped, *further]


def _with_recipe(beside: Supplied, reading: ReadDocument) -> Supplied:
    """What is beside a document, with the recipe that a command names; a document that is a recipe itself must be that
    one.
    """
    if beside.recipe is None or reading.source.folder is None or _starts(beside, reading):
        return beside
    if reading.format not in RECIPES:
        return beside.with_recipe()
    what = f"starts the training with {beside.recipe}, not with {reading.source.name}; translate that file"
    raise ConfigError([Problem("", what, beside.name)])


def _starts(beside: Supplied, reading: ReadDocument) -> bool:
    """Whether a command hands the document to its script, so that its own words count more than those of the
    document.
    """
    folder = reading.source.folder
    return beside.recipe is not None and folder is not None and beside.recipe.samefile(reading.source.name)


def _one_of(own: Topology | None, other: Topology | None, reading: ReadDocument, beside: Supplied) -> Topology | None:
    if reading.format == "accelerate" and other:
        return other  # `accelerate launch --num_processes` takes precedence over its file
    if own and other and own.world_size != other.world_size:
        what = (
            f"{own.world_size} ranks here, {other.world_size} in {beside.name}; correct one of them, or add "
            "--world-size N"
        )
        raise ConfigError([Problem("", what, reading.source.name)])
    return own or other


def _changed(overrides: Iterable[str]) -> frozenset[str]:
    paths = [text.partition("=")[0].strip() for text in overrides]
    return frozenset(field for field in _FIELDS if is_within(field, paths))


def _merged(reading: ReadDocument, format_: Format, told: Supplied, *, same: bool) -> tuple[list[Entry], list[Entry]]:
    """A document that is a file of arguments itself: both are read as one.

    A command that hands the file to its script counts more.
    """
    data, more = reading.source.data, told.values
    starts = _starts(told, reading)
    twice = [
        key for key in data if key in more and (starts or key not in _ENGINES) and not same_value(more[key], data[key])
    ]
    yielding = twice if starts and not same else []
    kept = {key: value for key, value in data.items() if key not in yielding}
    found = format_.entries(reading.source._replace(data={**more, **kept}), told.topology)
    own = [entry for entry in found if entry.path[0] in kept or (entry.assumed and entry.path[0] not in more)]
    own += [
        Entry((key,), data[key], KeyEffect(Fit.IGNORED, f"{told.place(key)} says {shown(more[key])}"))
        for key in yielding
    ]
    given = [told.placed(entry) for entry in found if entry.path[0] in more and entry.path[0] not in kept]
    left = (key for key in twice if key not in yielding)
    return own, [*given, *(_stays(key, told) if starts else _clash(key, reading, told) for key in left)]


def _stays(key: str, told: Supplied) -> Entry:
    effect = KeyEffect(Fit.IGNORED, launcher_config.STAYS, notable=True)
    return Entry((key,), told.values[key], effect, place=told.place(key), supplied=True)


def _clash(key: str, reading: ReadDocument, told: Supplied) -> Entry:
    place, value = str(reading.source.origins.of((key,))), told.values[key]
    note = f"is {shown(reading.source.data[key])} in {place or 'the config'}; make them equal, or leave one out"
    return Entry((key,), value, KeyEffect(Fit.UNSUPPORTED, note), place=told.place(key), supplied=True)


def _beside(reading: ReadDocument, format_: Format, told: Supplied, *, same: bool) -> tuple[list[Entry], list[Entry]]:
    """A document for an engine or a launcher: its engine's config is what the arguments would name."""
    engine, where = format_.for_trainer(reading.source)
    values = {key: value for key, value in told.values.items() if key not in _ENGINES}
    whole = told.format in RECIPES
    found = told.entries({**values, **(engine if whole or not told.format else {})}, reading.source)
    given = [told.placed(entry) for entry in found if entry.path[0] not in _ENGINES]
    given = [
        _of_the_loop(entry, of_launcher=not whole and bool(told.format))
        for entry in given
        if whole or not entry.assumed
    ]
    said, switch = launcher_config.as_launched(reading, told, told.topology, whole=whole, same=same)
    if switch:
        given = [entry for entry in given if entry.path != (switch,)] + ([_stays(switch, told)] if same else [])
    if not whole or where is None:
        return said, given
    inner = {
        (*where, *entry.path[1:]): entry for entry in found if entry.path[0] == _ENGINES[0] and len(entry.path) > 1
    }
    own = [_again(entry, inner[entry.path], told, where) if entry.path in inner else entry for entry in said]
    return own, given


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


def _again(entry: Entry, filled_in: Entry, told: Supplied, where: Path) -> Entry:
    """The entry as it is once transformers has filled in the engine's config."""
    if entry.effect.fit is Fit.UNSUPPORTED:
        return entry
    refused = filled_in.effect.fit is Fit.UNSUPPORTED and not entry.assumed
    names = trainer().filled_from(".".join(entry.path[len(where) :]))
    named = next((name for name in names if name in told.values), None)
    place = (told.place(named) if named else told.default) if names else ""
    if refused and place:
        what, _, instead = filled_in.effect.note.partition(";")
        return entry._replace(effect=filled_in.effect._replace(note=f"{what} ({place});{instead}"))
    known = entry.value == AUTO and filled_in.effect.fit is not Fit.NEEDS_INPUT
    return entry._replace(effect=filled_in.effect, place=place if known else "")


def _with_whole_batch(entries: Sequence[Entry], ranks: Topology | None) -> list[Entry]:
    """The entries, with the product that transformers fills in where every factor is known; no other tool takes the
    word.
    """
    said = {field: value for entry in entries for field, value in entry.effect.fields.items() if isinstance(value, int)}
    if not said.keys() >= set(_FACTORS):
        return list(entries)
    product = ranks and math.prod(said[field] for field in _FACTORS) * ranks.world_size
    ignored = KeyEffect(Fit.IGNORED, "the product of the other two and the ranks", rejected_upstream=True)
    effect = KeyEffect(fields={_WHOLE: product}) if product else ignored
    return [
        entry._replace(effect=effect) if entry.value == AUTO and entry.path[-1] == _BATCH else entry
        for entry in entries
    ]


def _opened(own: Iterable[Entry], given: Sequence[Entry]) -> list[Entry]:
    """The entries; a word `auto` that the tool itself would replace leaves the value to the arguments."""
    said = {field for entry in given if not entry.assumed for field in entry.effect.fields}
    return [_left_open(entry, said) if entry.value == AUTO else entry for entry in own]


def _left_open(entry: Entry, said: Collection[str]) -> Entry:
    effect = entry.effect
    fields = {field: Undecided("the arguments") if field in said else value for field, value in effect.fields.items()}
    return entry._replace(effect=effect._replace(fields=fields))
