"""Reads and writes TrainingArguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unishard.config import value_at
from unishard.config.describe import shown
from unishard.config.nested import Native, flat
from unishard.config.topology import Topology
from unishard.contract.entries import NOTHING, DocumentValues, Entry, Key, KeyEffect, Undecided, interpret
from unishard.contract.render import FieldResult, RenderedDocument
from unishard.contract.rules import Fit, Rule
from unishard.formats.files.source import Source
from unishard.formats.format import Format
from unishard.formats.hf.accepted_values import VALUES
from unishard.formats.hf.dialects import (
    DIALECT,
    PRECISION,
    arguments_in,
    around,
    bare,
    of_script,
    section_in,
    sure,
    with_script_defaults,
    wrapped,
)
from unishard.formats.hf.keys import ENGINES, KEYS, RENAMED
from unishard.formats.hf.loop import DEEPSPEED, FSDP
from unishard.formats.hf.quantizing import KEYS as QUANTIZED
from unishard.formats.hf.rules import RULES, render_arguments
from unishard.formats.hf.scheduling import length
from unishard.formats.hf.sharding import BOTH, FIRST, known, replicated, sharded
from unishard.formats.hf.zero import filled_from, partitioned, with_precedence
from unishard.formats.markers import Coverage
from unishard.formats.names import names
from unishard.formats.reading.document import ReadDocument

_OWN_IN_FP32 = ("precision.matmul", "scheduler.name")
_OWN_DEFAULTS = (*_OWN_IN_FP32, "precision.reduce", "precision.loss_scale_growth_interval")
"""Fields that Trainer, or DeepSpeed below it, decides otherwise than the schema where a file is silent: written out
wherever the source decides them, if only by its engine."""


class HfFormat(Format):
    """TrainingArguments."""

    name = "hf"
    tool = "transformers 5.23"
    keys = KEYS
    rules = RULES
    yaml_1_1 = True
    fills_auto = True

    def coverage(self, source: Source) -> Coverage:
        """How many of the keys are arguments; all count where a script's own file surely has some."""
        return Coverage(1.0) if sure(source.data, KEYS) else super().coverage(source)

    def entries(self, source: Source, topology: Topology | None) -> Sequence[Entry]:
        """What the arguments say, those of the engine that they choose, and what Trainer assumes."""
        if _is_bare(source):
            return _bare(source, topology)
        entries = _in_section(source, lambda inner: _entries(inner, topology, section=inner is not source))
        return [_refused(entry) if entry.path[-1] in RENAMED else entry for entry in entries]

    def stays_in_place(self, source: Source) -> bool:
        """Not those of a section, or of a file that `fsdp_config` names: TrainingArguments are written."""
        return section_in(source.data) is None and not _is_bare(source)

    def only_written(self, source: Source, topology: Topology | None) -> list[Entry]:
        """What arguments say that may be those of a script with a loop of its own, which has other defaults."""
        keys = {name: row._replace(tool_default=NOTHING) for name, row in KEYS.items()}
        entries = interpret(keys, source.data, tool="transformers 5.23", ignores_unknown=True, topology=topology)
        beside = [entry for entry in entries if entry.path[0] not in ENGINES]
        engine = source.data.get(DEEPSPEED)
        if isinstance(engine, Mapping):
            on = Entry((DEEPSPEED,), True, KeyEffect(fields={"backend": "deepspeed"}))
            engine_entries = [Entry((DEEPSPEED, *key.split(".")), value, KeyEffect()) for key, value in flat(engine)]
            beside = [entry for entry in with_precedence([*beside, on, *engine_entries]) if entry.path[0] != DEEPSPEED]
        shaped = any("scheduler.name" in entry.effect.fields for entry in beside)
        return [_of_any_script(entry, shaped=shaped) for entry in beside]

    def section_of(self, data: Mapping[str, Any]) -> str | None:
        """The section of a document that holds TrainingArguments; None where they stand at the top."""
        return section_in(data)

    def arguments_in(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """TrainingArguments of a document, which may stand in a section of it."""
        return arguments_in(data)

    def filled_from(self, key: str) -> tuple[str, ...]:
        """The arguments that take the place of `"auto"` at a key of DeepSpeed's config."""
        return filled_from(key)

    def write(self, reading: ReadDocument, topology: Topology) -> RenderedDocument:
        """Arguments that `transformers.TrainingArguments(**...)` takes; the engine's stand in `fsdp_config` or
        `deepspeed`.
        """
        own = _OWN_DEFAULTS if reading.config.precision.compute != "fp32" else _OWN_IN_FP32
        return render_arguments(reading.deciding(own), topology, self.name)


FORMAT = HfFormat()


def _refused(entry: Entry) -> Entry:
    return entry._replace(effect=entry.effect._replace(rejected_upstream=True))


def _of_any_script(entry: Entry, *, shaped: bool) -> Entry:
    if entry.effect.notable and entry.effect.fit is Fit.IGNORED:
        note = "DeepSpeed's config decides, unless the script passes its own to deepspeed.initialize"
        return entry._replace(effect=entry.effect._replace(note=note))
    if not shaped and "scheduler.total_steps" in entry.effect.fields and not entry.assumed:
        return entry._replace(effect=length(f"ends after {shown(entry.value)} updates"))
    if not shaped and any(field.startswith("scheduler.") for field in entry.effect.fields):
        return entry._replace(effect=KeyEffect(Fit.IGNORED, _UNSHAPED, notable=True))
    fields = {field: value for field, value in entry.effect.fields.items() if field != "optimizer.no_decay"}
    return entry._replace(effect=entry.effect._replace(fields=fields, copy_verbatim=False))


_UNSHAPED = "belongs to a schedule that only the script knows"


def _is_bare(source: Source) -> bool:
    return bare(source.data, (*BOTH, *FIRST)) or (bool(source.data) and all(known(str(key)) for key in source.data))


def _bare(source: Source, topology: Topology | None) -> list[Entry]:
    """A file that `fsdp_config` names. Written again, its keys stand in `fsdp_config`."""
    entries = sharded(True, source.data, source, topology, where=(), implied=True)
    return [*(entry._replace(effect=entry.effect._replace(copy_verbatim=False)) for entry in entries), _OPEN_DTYPE]


_SWITCHES_OF_DTYPE = "bf16 and fp16 of the TrainingArguments"
_OPEN_DTYPE = Entry(
    ("bf16",),
    None,
    KeyEffect(
        Fit.NEEDS_INPUT,
        f"the value comes from {_SWITCHES_OF_DTYPE}",
        {"precision.compute": Undecided(_SWITCHES_OF_DTYPE)},
    ),
    assumed=True,
)
"""What FSDP's arguments leave open where the others are not in the file."""


def _in_section(source: Source, read: Callable[[Source], list[Entry]]) -> list[Entry]:
    """The entries, also where the arguments stand in a section of a script's own file."""
    name = section_in(source.data)
    if name is None:
        return read(source)
    engine = _engine_beside(source.data, name)
    entries = read(source._replace(data={**source.data[name], **engine}))
    # Written in its own format again, the arguments stand at the top.
    inner = [
        entry._replace(
            path=entry.path if entry.path[0] in engine else (name, *entry.path),
            effect=entry.effect._replace(copy_verbatim=entry.goes_through and entry.effect.fit is Fit.UNSUPPORTED),
        )
        for entry in entries
    ]
    beside = {str(key): value for key, value in source.data.items() if key not in (name, *engine)}
    words = QUANTIZED.keys() & beside
    keys = {**QUANTIZED, **dict.fromkeys(beside.keys() - words, Key(_beside))}
    return [*inner, *interpret(keys, beside, tool="the script", defaults=source.data[name])]


_BESIDE = KeyEffect(Fit.IGNORED, "not a TrainingArguments key: only the script reads it", beyond_fields=True)


def _beside(value: Any, document: DocumentValues) -> KeyEffect:
    """What a part of the file says that only the script reads; it may choose how the model is sharded."""
    leaves = flat(value) if isinstance(value, Mapping) else ()
    if any(key.rpartition(".")[2] in _CHOICES and _ENGINE.search(str(item)) for key, item in leaves):
        note = "the script chooses here how it shards; add --set backend=... --set sharding.strategy=..."
        return KeyEffect(Fit.NEEDS_INPUT, note, {"sharding.strategy": Undecided("the training script")})
    effect = of_script(value, document)
    return (_BESIDE if effect.unknown else effect)._replace(copy_verbatim=False)


_CHOICES = names("strategy distributed_strategy distributed_type")
_ENGINE = re.compile(r"deepspeed|fsdp|zero|shard|ddp", re.IGNORECASE)


def _engine_beside(data: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """DeepSpeed's config where a script's file has it beside the section, as the script hands both on."""
    config = data.get(DEEPSPEED)
    named = isinstance(config, str) or (isinstance(config, Mapping) and "zero_optimization" in config)
    return {DEEPSPEED: config} if named and not set(ENGINES) & set(data[section]) else {}


def entries_of(
    source: Source, topology: Topology | None, *, own: Mapping[str, Key], silent: Mapping[str, Any]
) -> list[Entry]:
    """The entries of a script's arguments and TrainingArguments in one file.

    Args:
        source: The document.
        topology: The ranks.
        own: Rows of the script's arguments.
        silent: What the script assumes, by argument.
    """
    keys = {
        name: row._replace(tool_default=silent[name]) if name in silent else row
        for name, row in {**KEYS, **own}.items()
    }
    return _read(source, topology, {**keys, **around(source.data, keys, KEYS)})


def _entries(source: Source, topology: Topology | None, *, section: bool = False) -> list[Entry]:
    data = source.data
    if not section and not wrapped(data):
        return _read(source, topology, KEYS)
    keys = {**KEYS, **DIALECT}
    return _read(source, topology, {**with_script_defaults(keys, data), **around(data, keys, KEYS)})


def is_whole(data: Mapping[str, Any]) -> bool:
    """Whether a document has arguments, not only what FSDP or DeepSpeed gets."""
    return any(key in KEYS and key not in ENGINES for key in data)


def _read(source: Source, topology: Topology | None, keys: Mapping[str, Key]) -> list[Entry]:
    data = source.data
    whole = is_whole(data) or (wrapped(data) and data.keys().isdisjoint(ENGINES))
    if not whole:
        keys = {name: row._replace(tool_default=NOTHING) for name, row in keys.items()}
    entries = interpret(keys, data, tool="transformers 5.23", topology=topology, accepts=VALUES)
    entries = [entry for entry in entries if entry.path[0] not in ENGINES]

    def argument(key: str) -> Any:
        silent = keys[key].tool_default if key in keys else NOTHING
        return data.get(key, None if silent is NOTHING else silent)

    return with_precedence([*entries, *_engines(source, argument, topology, whole)])


def _engines(source: Source, argument: Any, topology: Topology | None, whole: bool) -> list[Entry]:
    data = source.data
    entries = []
    if FSDP in data or "fsdp_config" in data:
        entries += sharded(data.get(FSDP), data.get("fsdp_config"), source, topology)
        entries += [] if whole else [_OPEN_DTYPE]
    if DEEPSPEED in data:
        entries += partitioned(data[DEEPSPEED], source, argument, topology)
    if whole and not any("backend" in entry.effect.fields for entry in entries):
        entries.append(replicated())
    return entries


_NAMES = {today: older for older, today in RENAMED.items() if older.startswith("gradient_")}
"""Arguments that these scripts still call by the older name."""
_SWITCHES = {"gradient_checkpointing": ("activation_checkpointing", "none"), "bf16": ("precision.compute", "fp32")}
"""Of arguments that a script may switch on by itself, the field that they decide, and its value where they are off."""


def _said_off(name: str, reading: ReadDocument, document: Native) -> bool:
    """Whether the source says that an argument which is not written is off, or other words do it: FSDP's own switch,
    `fp16`, or the dtype in which the script loads the model.
    """
    field, _ = _SWITCHES[name]
    decided = field in reading.decided and field not in reading.undecided
    return decided and (name != "bf16" or "fp16" not in document)


def _silently_off(name: str, reading: ReadDocument) -> bool:
    """Whether the engine of the source does without what an argument switches on."""
    field, off = _SWITCHES[name]
    return reading.decides(field) and bool(value_at(reading.config, field) == off)


class ScriptFormat(HfFormat):
    """TrainingArguments with the names and the defaults of a script around them; its other arguments are carried."""

    keys: Mapping[str, Key] = {}
    rules: Mapping[str, Rule] = {}
    own: Mapping[str, Key] = DIALECT
    """Rows for the arguments that are not those of TrainingArguments."""
    switched_on: tuple[str, ...] = ()
    """Arguments that are on unless a file says false, but off in transformers."""
    loads: Mapping[str, Native] = {}
    """By dtype, what says that the model is loaded in it, and trains so."""

    def silent(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the script assumes where a file is silent and transformers assumes otherwise, by argument."""
        return {}

    def entries(self, source: Source, topology: Topology | None) -> Sequence[Entry]:
        """What the arguments say, and what the script and Trainer assume."""
        return _in_section(
            source, lambda inner: entries_of(inner, topology, own=self.own, silent=self.silent(inner.data))
        )

    def write(self, reading: ReadDocument, topology: Topology) -> RenderedDocument:
        """The arguments that train; a file also needs those about the model and the data."""
        rendered = self._loaded(super().write(reading, topology), reading)
        document = {_NAMES.get(key, key): value for key, value in rendered.document.items()}
        words = {path: _renamed(word) for path, word in rendered.fields.items()}
        silent = [name for name in self.switched_on if name not in document]
        off = [name for name in silent if _said_off(name, reading, document)]
        if is_whole({**document, **dict.fromkeys(off, False)}):
            off += [name for name in silent if _silently_off(name, reading)]
        for field in (_SWITCHES[name][0] for name in off if _SWITCHES[name][0] in words):
            words[field] = words[field]._replace(keys=tuple(off))
        return RenderedDocument({**document, **dict.fromkeys(off, False)}, words)

    def _loaded(self, rendered: RenderedDocument, reading: ReadDocument) -> RenderedDocument:
        """The document with the dtype in which the script loads a model that has no fp32 masters."""
        cfg = reading.config
        words = self.loads.get(cfg.precision.compute) if cfg.precision.pure and cfg.backend == "fsdp" else None
        if words is None or "precision.master" not in rendered.fields:
            return rendered
        result = FieldResult.held(*words)
        said = {
            field for field in PRECISION if field in rendered.fields and value_at(cfg, field) == cfg.precision.compute
        }
        return RenderedDocument({**rendered.document, **words}, {**rendered.fields, **dict.fromkeys(said, result)})


def _renamed(word: FieldResult) -> FieldResult:
    words = ", ".join(_NAMES.get(name, name) for name in word.key.split(", "))
    return word._replace(key=words, keys=tuple(_NAMES.get(key, key) for key in word.keys))
