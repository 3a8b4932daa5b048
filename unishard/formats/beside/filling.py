"""Fill what a document leaves open from what `--with` names."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from unishard.config import Config, leaves
from unishard.config.nested import is_within
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, KeyEffect, Undecided
from unishard.contract.render import AUTO
from unishard.contract.rules import Fit
from unishard.errors import ConfigError, Problem
from unishard.formats import catalog
from unishard.formats.beside import launcher_config
from unishard.formats.beside.engine_choice import RECIPES, engine_is_open
from unishard.formats.beside.precedence import counting
from unishard.formats.beside.read_together import read_together
from unishard.formats.beside.supplied import Supplied, open_supplied
from unishard.formats.launch.processes import Launch
from unishard.formats.reading.document import ReadDocument, assemble
from unishard.formats.reading.dropping import DroppedKey, drop_entries

_FIELDS = frozenset(path for path, _ in leaves(Config))
_BATCH, _WHOLE = "train_batch_size", "training.global_batch_size"
_FACTORS = ("training.micro_batch_size", "training.gradient_accumulation_steps")


def filled(
    reading: ReadDocument,
    with_: str | Path,
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
    drop, overrides, same = tuple(drop), tuple(overrides), reading.format == to
    supplied, dropped = _with_recipe(open_supplied(with_, reading.source.folder), reading).without(drop)
    ranks = topology or _ranks(reading, supplied) or reading.topology
    supplied = _fitted(supplied, reading)._replace(topology=ranks)
    own, added = read_together(reading, supplied, same=same)
    unknown = tuple(dict.fromkeys(entry.key for entry in added if entry.effect.unknown))
    own = _opened(own, added)
    added += [] if same else supplied.started
    own, noted = _with_launcher(own, added, reading, supplied, same=same)
    entries = [*own, *counting(own, added, reading, _changed(overrides), same=same), *noted]
    entries, further = drop_entries(_with_whole_batch(entries, ranks), drop)
    complete = assemble(
        reading.format, reading.source, entries, overrides=overrides, topology=ranks, fills_auto=reading.fills_auto
    )
    if same and supplied.launcher:
        supplied = supplied._replace(launch=Launch())  # the launcher has the engine, which torchrun would lose
    return complete, supplied._replace(unknown=unknown), [*dropped, *further]


def _with_recipe(supplied: Supplied, reading: ReadDocument) -> Supplied:
    """What is beside a document, with the recipe that a command names; a document that is a recipe itself must be that
    one.
    """
    if supplied.recipe is None or reading.source.folder is None or supplied.starts(reading):
        return supplied
    if reading.format not in RECIPES:
        return supplied.with_recipe()
    message = f"starts the training with {supplied.recipe}, not with {reading.source.name}; translate that file"
    raise ConfigError([Problem("", message, supplied.name)])


def _ranks(reading: ReadDocument, supplied: Supplied) -> Topology | None:
    """The ranks that a document or what is beside it asks for."""
    own, theirs = catalog.get(reading.format).ranks(reading.source), supplied.topology
    if reading.format == "accelerate" and theirs:
        return theirs  # `accelerate launch --num_processes` takes precedence over its file
    if own and theirs and own.world_size != theirs.world_size:
        message = (
            f"{own.world_size} ranks here, {theirs.world_size} in {supplied.name}; correct one of them, or add "
            "--world-size N"
        )
        raise ConfigError([Problem("", message, reading.source.name)])
    return own or theirs


def _fitted(supplied: Supplied, reading: ReadDocument) -> Supplied:
    """What is beside a document, in the words in which it is read with it.

    Raises:
        ConfigError: It is a config of DeepSpeed, and the document names an engine.
    """
    if supplied.format == "deepspeed" and not engine_is_open(reading.entries):
        message = (
            "is a config of DeepSpeed, for TrainingArguments that name no engine; give --with what the script gets"
        )
        raise ConfigError([Problem("", message, supplied.name)])
    if reading.format == "accelerate":
        unlaunched = {key: value for key, value in supplied.values.items() if key not in supplied.options}
        return supplied._replace(values=unlaunched)
    if reading.format in RECIPES and supplied.format not in RECIPES:
        values = {} if supplied.format == "accelerate" else supplied.values
        return supplied._replace(values=values, format=reading.format)
    return supplied


def _with_launcher(
    own: list[Entry], added: Sequence[Entry], reading: ReadDocument, supplied: Supplied, *, same: bool
) -> tuple[list[Entry], list[Entry]]:
    """The entries of a document with those of the launcher, and notes on what stays with the launcher."""
    if reading.format == "accelerate" and same:
        return own, list(launcher_config.staying_options(reading, supplied))
    if reading.format not in RECIPES or not engine_is_open(own):
        return own, []
    if same:
        return own, launcher_config.staying(supplied)
    return launcher_config.decided(own, added, supplied, reading), []


def _changed(overrides: Iterable[str]) -> frozenset[str]:
    paths = [text.partition("=")[0].strip() for text in overrides]
    return frozenset(field for field in _FIELDS if is_within(field, paths))


def _with_whole_batch(entries: Sequence[Entry], ranks: Topology | None) -> list[Entry]:
    """The entries, with the product that transformers fills in where every factor is known; no other tool takes the
    word.
    """
    values = {
        field: value for entry in entries for field, value in entry.effect.fields.items() if isinstance(value, int)
    }
    if not values.keys() >= set(_FACTORS):
        return list(entries)
    product = ranks and math.prod(values[field] for field in _FACTORS) * ranks.world_size
    ignored = KeyEffect(Fit.IGNORED, "the product of the other two and the ranks", rejected_upstream=True)
    effect = KeyEffect(fields={_WHOLE: product}) if product else ignored
    return [
        entry._replace(effect=effect) if entry.value == AUTO and entry.path[-1] == _BATCH else entry
        for entry in entries
    ]


def _opened(own: Iterable[Entry], added: Sequence[Entry]) -> list[Entry]:
    """The entries; a word `auto` that the tool itself would replace leaves the value to the arguments."""
    fields = {field for entry in added if not entry.assumed for field in entry.effect.fields}
    return [_left_open(entry, fields) if entry.value == AUTO else entry for entry in own]


def _left_open(entry: Entry, decided: Collection[str]) -> Entry:
    effect = entry.effect
    fields = {
        field: Undecided("the arguments") if field in decided else value for field, value in effect.fields.items()
    }
    return entry._replace(effect=effect._replace(fields=fields))
