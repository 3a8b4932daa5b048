"""How axolotl says each field of the config (axolotl 0.18.0)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native, merge
from unishard.config.shard_groups import shard_group_size
from unishard.config.topology import Topology
from unishard.contract.entries import DocumentValues, Key, KeyEffect, left_out
from unishard.contract.field_rows import asked, exact, keeps_more, started_elsewhere, when_default
from unishard.contract.key_rows import number, text
from unishard.contract.render import Rendered, render
from unishard.contract.rules import PURE, SCRIPT, Fit, Rule, approximate, equivalent, unless
from unishard.formats.hf.accepted_values import VALUES
from unishard.formats.hf.kept import AXOLOTL, with_arguments
from unishard.formats.hf.loop import off, switched_on, without
from unishard.formats.hf.rules import RULES as ARGUMENTS
from unishard.formats.hf.rules import decided_of, engine_of
from unishard.formats.hf.saving import EPOCHS, limit, stepped
from unishard.formats.reading import ReadDocument

FOLDER = "./model-out"
"""Where axolotl writes if it is not set (schemas/config.py)."""
_KEPT = 4
"""How many checkpoints it keeps if it is not set."""
_MANY = 1_000_000
"""Stands for all of them: 0 and null stand for four."""


def _beside(given: DocumentValues) -> Mapping[str, Any]:
    """What axolotl assumes about the checkpoints that it writes."""
    folder = {} if given.get("output_dir") else {"checkpoint.dir": FOLDER}
    return folder if given.get("save_total_limit") else {**folder, "checkpoint.keep_last": _KEPT}


def _directory(value: Any, given: DocumentValues) -> KeyEffect:
    if not value:
        return left_out("is not set")
    return KeyEffect(fields={"checkpoint.dir": text(value)})


def _steps(value: Any, given: DocumentValues) -> KeyEffect:
    if off(value):
        return left_out("is not set")
    return stepped(value, given, _beside(given))


def _strategy(value: Any, given: DocumentValues) -> KeyEffect:
    if not off(given.get("save_steps")):
        return left_out("save_steps counts")
    if value is None:
        return left_out("is not set")
    if value is False or value == "no":  # YAML reads a bare no as false, and axolotl's schema takes it
        return KeyEffect(fields={"checkpoint.every_steps": None})
    VALUES["save_strategy"](value)
    if value == "steps":
        return stepped(500, given, _beside(given))
    if value == "best":
        return KeyEffect(
            Fit.NEEDS_INPUT,
            "saves where an evaluation was the best so far; call engine.save(metric=...) there, and set "
            "checkpoint.keep_best",
            copy_verbatim=True,
        )
    return KeyEffect(Fit.NEEDS_INPUT, EPOCHS, copy_verbatim=True)


def _times(value: Any, given: DocumentValues) -> KeyEffect:
    """`saves_per_epoch`."""
    if off(value):
        return left_out("is not set")
    number(0)(value)
    return KeyEffect(
        Fit.NEEDS_INPUT,
        "counts in epochs, of which only the data knows; set checkpoint.every_steps",
        copy_verbatim=True,
    )


def _limit(value: Any, given: DocumentValues) -> KeyEffect:
    found = limit(value, given)
    count = found.fields.get("checkpoint.keep_last", _KEPT)
    return KeyEffect(fields={"checkpoint.keep_last": None if count == _MANY else count or _KEPT})


SAVED: Mapping[str, Key] = {
    "output_dir": Key(_directory, "checkpoint.dir"),
    "save_steps": Key(
        _steps, "checkpoint.every_steps", Fit.EQUIVALENT, "axolotl also saves at the end of the training"
    ),
    "save_strategy": Key(_strategy, "checkpoint.every_steps", note="your loop does epoch and best"),
    "saves_per_epoch": Key(_times, "", Fit.NEEDS_INPUT, "counts in epochs"),
    "save_total_limit": Key(
        _limit, "checkpoint.keep_last", note=f"axolotl keeps {_KEPT} where it saves and this is not said"
    ),
}
"""What each key says."""


def _kept(cfg: Config, topology: Topology) -> Native:
    """All are kept by a number that no training reaches; nothing needs to be said where nothing is saved by itself."""
    count = None if keeps_more(cfg) else cfg.checkpoint.keep_last
    return {} if count is None and cfg.checkpoint.every_steps is None else {"save_total_limit": count or _MANY}


SAVING: Mapping[str, Rule] = {
    "checkpoint.keep_last": exact(
        "save_total_limit",
        when_default("checkpoint.keep_last", "all: written as a number that no training reaches"),
        approximate("with keep_every or keep_best", keeps_more, "all are kept"),
        to=_kept,
    ),
    **asked(
        Fit.NEEDS_INPUT,
        SCRIPT,
        {
            "checkpoint.every_minutes": "an axolotl plugin whose TrainerCallback sets control.should_save",
            "checkpoint.on_signal": "an axolotl plugin whose TrainerCallback sets should_save and should_training_stop",
        },
    ),
}
"""How a field is said, where TrainingArguments say it otherwise."""

_WORDS = {argument: name for name, argument in AXOLOTL.items()} | {
    "fsdp_config.cpu_offload": "fsdp_config.offload_params",
    "fsdp": "fsdp_version",
    "lr_scheduler_kwargs": "cosine_min_lr_ratio, lr_scheduler_kwargs",
    "fsdp_config.pin_memory": "fsdp_config.cpu_offload_pin_memory",
}
_WORD = re.compile(r"[a-z_0-9.]+")


def _named(key: str) -> str:
    """A key in words, under axolotl's names."""
    named = _WORD.sub(lambda found: _WORDS.get(found.group(), found.group()), key)
    return re.sub(r"\bactivation_checkpointing\b(?!,? *fsdp|\.)", "gradient_checkpointing", named, count=1)


def _precision(cfg: Config, topology: Topology) -> Native:
    return {"bf16": cfg.precision.compute == "bf16"} | ({"fp16": True} if cfg.precision.compute == "fp16" else {})


def _groups(cfg: Config, topology: Topology) -> Native:
    if not cfg.sharding.hybrid or not switched_on(cfg):
        return {}
    group = shard_group_size(cfg, topology)
    groups = topology.world_size // group
    return {"dp_replicate_size": groups, "dp_shard_size": group} if groups > 1 else {}


def _pinned(cfg: Config, topology: Topology) -> Native:
    on = switched_on(cfg) and "cpu" in (cfg.offload.params, cfg.offload.optimizer)
    return {"fsdp_config": {"pin_memory": False}} if on and not cfg.offload.pin_memory else {}


def _bf16_without_engine(cfg: Config) -> bool:
    """Whether no engine keeps fp32 master weights beside a model in bf16."""
    return without(cfg) and cfg.precision.compute == "bf16"


_LOADED = "axolotl loads the model in bf16: without an engine, optimizer state is bf16 too"
_PURE = "axolotl's engines keep fp32 master weights beside bf16: more exact, more memory"

_LAUNCHER = {
    "nodes": "--nnodes",
    "processes_per_node": "--nproc_per_node",
    "endpoint": "--rdzv_endpoint",
    "rendezvous": "--rdzv_backend",
    "rendezvous_id": "--rdzv_id",
    "rendezvous_options": "--rdzv_conf",
    "max_restarts": "--max_restarts",
}
"""Options of torchrun, which axolotl's command line hands on; its YAML has none."""

_OWN: Mapping[str, Rule] = {
    "sharding.strategy": exact(
        "fsdp_config.reshard_after_forward, dp_replicate_size, dp_shard_size",
        ARGUMENTS["sharding.strategy"].when[0],
        ARGUMENTS["sharding.strategy"].when[-1],
        to=_groups,
    ),
    "sharding.group_size": exact("dp_shard_size, dp_replicate_size"),
    "offload.pin_memory": exact("fsdp_config.cpu_offload_pin_memory", to=_pinned),
    "precision.compute": exact(
        "bf16, fp16",
        equivalent(
            "fp16 and no_shard",
            lambda cfg: without(cfg) and cfg.precision.compute == "fp16",
            "torch.autocast keeps some operations in fp32; without it all run in this dtype",
        ),
        to=_precision,
    ),
    "precision.master": exact(
        "bf16, fp16",
        unless("fp32", lambda cfg: not cfg.precision.pure and not _bf16_without_engine(cfg)),
        unless("bf16 without an engine", lambda cfg: cfg.precision.pure and _bf16_without_engine(cfg)),
        approximate("fp32 without an engine", lambda cfg: not cfg.precision.pure, _LOADED),
        approximate(*PURE, _PURE),
    ),
    "precision.reduce": ARGUMENTS["precision.reduce"]._replace(
        when=(
            unless("bf16 without an engine", lambda cfg: _bf16_without_engine(cfg) and cfg.precision.reduce == "bf16"),
            approximate("fp32 without an engine", _bf16_without_engine, _LOADED),
            *ARGUMENTS["precision.reduce"].when,
        )
    ),
    "precision.accumulate": ARGUMENTS["precision.accumulate"]._replace(
        when=(
            unless(
                "bf16 without an engine", lambda cfg: _bf16_without_engine(cfg) and cfg.precision.accumulate == "bf16"
            ),
            approximate("fp32 without an engine", _bf16_without_engine, _LOADED),
            *ARGUMENTS["precision.accumulate"].when,
        )
    ),
    **SAVING,
    **started_elsewhere(
        **{name: f"pass axolotl train --launcher torchrun -- {option}" for name, option in _LAUNCHER.items()}
    ),
}

RULES: Mapping[str, Rule] = {name: row._replace(key=_named(row.key)) for name, row in {**ARGUMENTS, **_OWN}.items()}
"""Rows of TrainingArguments under axolotl's names, and its own."""


def written(reading: ReadDocument, topology: Topology, known: Collection[str]) -> Rendered:
    """The keys for a config, and what became of each field.

    Args:
        reading: The config.
        topology: The ranks.
        known: Arguments of transformers that axolotl has.

    Raises:
        ConfigError: axolotl does not know the engine.
    """
    own = render(decided_of(RULES, reading), reading.config, topology, reading.undecided)
    engine = engine_of(reading, topology)
    mine = _OWN if reading.config.backend == "fsdp" else {}
    words = {name: word for name, word in engine.fields.items() if name not in mine}
    said = with_arguments(Rendered(merge(own.document, engine.document), words), reading, "axolotl", known)
    fields = {name: word._replace(key=_named(word.key)) for name, word in said.fields.items()}
    return Rendered(_renamed(said.document), {**own.fields, **fields})


def _renamed(document: Native) -> Native:
    """The document under axolotl's names."""
    found: Native = {}
    for name, value in document.items():
        found |= _RENAMED[name](name, value) if name in _RENAMED else {_WORDS.get(name, name): value}
    return found


def _fsdp(name: str, value: Mapping[str, Any]) -> Native:
    keys = {_KEYS.get(key, key): item for key, item in value.items()}
    if isinstance(keys.get("transformer_layer_cls_to_wrap"), list):
        keys["transformer_layer_cls_to_wrap"] = ",".join(keys["transformer_layer_cls_to_wrap"])
    return {"fsdp_version": 2, "fsdp_config": {key: item for key, item in keys.items() if key != "version"}}


def _kwargs(name: str, value: Mapping[str, Any]) -> Native:
    return {"cosine_min_lr_ratio": value["min_lr_rate"]} if "min_lr_rate" in value else {name: value}


def _warmup(name: str, value: Any) -> Native:
    """Axolotl takes whole numbers as `warmup_steps` (schemas/config.py)."""
    return {"warmup_ratio" if isinstance(value, float) and 0 < value < 1 else name: value}


_KEYS = {"cpu_offload": "offload_params", "pin_memory": "cpu_offload_pin_memory"}
_RENAMED: Mapping[str, Callable[[str, Any], Native]] = {
    "fsdp": lambda name, value: {},
    "fsdp_config": _fsdp,
    "lr_scheduler_kwargs": _kwargs,
    "lr_scheduler_type": (lambda name, value: {"lr_scheduler": "cosine" if value == "cosine_with_min_lr" else value}),
    "warmup_steps": _warmup,
    "activation_checkpointing": lambda name, value: {"gradient_checkpointing": value},
    "activation_checkpointing_kwargs": lambda name, value: {"gradient_checkpointing_kwargs": value},
}
