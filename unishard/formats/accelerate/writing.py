"""From a config to a file for `accelerate launch --config_file`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native, flat, merge
from unishard.config.topology import Topology
from unishard.contract.entries import Path
from unishard.contract.render import AUTO, FieldResult, RenderedDocument, render
from unishard.contract.rules import Fit, Rule
from unishard.errors import ConfigError, Problem
from unishard.formats.accelerate.deepspeed import FILE, NAMES, NO_FILE, opened
from unishard.formats.accelerate.deepspeed_rules import DEEPSPEED_RULES, SAVE, SAVE_KEY
from unishard.formats.accelerate.entries import NO_WORDS, block_of, kind_of, precision_of
from unishard.formats.accelerate.rules import FSDP_RULES
from unishard.formats.files.documents import yaml_text
from unishard.formats.files.source import Source
from unishard.formats.reading.document import ReadDocument


def for_trainer(source: Source) -> tuple[Mapping[str, Any], Path | None]:
    """The arguments, and where in the file DeepSpeed's own config is named."""
    match kind_of(source.data).engine:
        case "fsdp":
            version = block_of(source.data, "fsdp_config").get("fsdp_version", 1)
            return {"fsdp": True, "fsdp_config": {"version": version}}, None
        case "deepspeed":
            return _of_deepspeed(source)
    return {}, None


def _of_deepspeed(source: Source) -> tuple[Mapping[str, Any], Path | None]:
    block = block_of(source.data, "deepspeed_config")
    if (name := block.get(FILE[-1])) not in NO_FILE:
        try:
            document = opened(name, source.folder)
        except ConfigError:
            document = None
        return ({}, None) if document is None else ({"deepspeed": document}, FILE)
    # Accelerate itself builds this one; what it leaves open is filled in.
    dtype = precision_of(source.data)
    return {
        "deepspeed": {
            "zero_optimization": {"stage": block.get("zero_stage", 2)},
            "train_micro_batch_size_per_gpu": AUTO,
            "gradient_accumulation_steps": block.get("gradient_accumulation_steps", AUTO),
            NAMES["gradient_clipping"]: AUTO,
            **({dtype: {"enabled": True}} if dtype in ("bf16", "fp16") else {}),
        }
    }, None


TABLES: Mapping[str, Mapping[str, Rule]] = {"fsdp": FSDP_RULES, "deepspeed": DEEPSPEED_RULES}
"""Rows by engine."""

_SEVERAL: Mapping[str, Native] = {"deepspeed": {"deepspeed_config": {"deepspeed_multinode_launcher": "standard"}}}
_SAVED = FieldResult.held(f"deepspeed_config.{SAVE_KEY}")
_NO_KEY = FieldResult(
    Fit.IGNORED, "", "no key for it; pass it to the Accelerator's plugin or write a deepspeed_config_file"
)
_ENGINES = ("backend", "native", "sharding.", "offload.")
"""Fields that are the engine's, not the training script's: Accelerate without `fsdp_auto_wrap_policy` gathers the whole
model at once."""
_NO_SHARDS = (
    "Accelerate shards over groups of {} ranks in parts of {} for sequences, which must be more than one; choose a "
    "larger sharding.group_size or full_shard"
)
_NO_GROUPS = "{} ranks make no groups of {}; add --world-size and --gpus-per-node"


def expressed(reading: ReadDocument, topology: Topology) -> RenderedDocument:
    """The file, and what became of each field. What the source leaves to its training script stays with it.

    Raises:
        ConfigError: Accelerate does not know the engine.
    """
    config = reading.config
    if config.backend not in TABLES:
        message = f"Accelerate has no backend {config.backend}; add --set backend=fsdp or backend=deepspeed"
        raise ConfigError([Problem("backend", message)])
    left = frozenset(path for path in reading.unsaid if path in reading.undecided or not path.startswith(_ENGINES))
    open_ = frozenset(
        {"training.gradient_clipping"} & left if config.backend == "deepspeed" else ()
    )  # its own default would clip to 1.0 in silence
    # Where a value is not set, the key is left out: Accelerate's own default is the same as its word "auto".
    table = {
        path: row._replace(auto=row.auto and path not in left - open_) for path, row in TABLES[config.backend].items()
    }
    rendered = render(table, config, topology, left | frozenset(reading.undecided))
    words = {
        **rendered.fields,
        **_native_words(config),
        **_group_words(reading, topology, rendered.fields["sharding.strategy"]),
        **_sharing_words(reading, topology, rendered.fields["parallel.sequence.size"]),
    }
    document = merge(rendered.document, merge(_ranks(reading, topology), _starts(config, topology)))
    return RenderedDocument(merge(document, _alone(reading, topology, document)), words)


def _alone(reading: ReadDocument, topology: Topology, document: Native) -> Native:
    """The word for one process without an engine, which Accelerate wants with one GPU; with `MULTI_GPU`, two."""
    said = reading.format == "accelerate" and reading.source.data.get("distributed_type") in NO_WORDS
    one = said or "," not in document.get("gpu_ids", ",")
    return {"distributed_type": "NO"} if one and topology.world_size == 1 and "MULTI_GPU" in document.values() else {}


def _ranks(reading: ReadDocument, topology: Topology) -> Native:
    """How many processes there are; left out where it is unknown, so that `accelerate launch` asks for it."""
    if reading.topology is None and topology.world_size == 1:
        return {}
    return {
        "num_processes": topology.world_size,
        "num_machines": max(topology.world_size // topology.local_world_size, 1),
    }


def _starts(config: Config, topology: Topology) -> Native:
    """How DeepSpeed's processes are started on several machines: as FSDP's are, not with pdsh, which wants a
    hostfile.
    """
    return _SEVERAL.get(config.backend, {}) if topology.world_size > topology.local_world_size else {}


def _native_words(config: Config) -> Mapping[str, FieldResult]:
    """What became of each setting that only the engine has."""
    settings = dict(flat(config.native.get(config.backend, {})))
    return {
        f"native.{config.backend}.{key}": _SAVED if f"{config.backend}.{key}" == SAVE else _NO_KEY for key in settings
    }


def _group_words(reading: ReadDocument, topology: Topology, strategy_result: FieldResult) -> Mapping[str, FieldResult]:
    """What became of groups of ranks that cannot be written."""
    sharding = reading.config.sharding
    group = sharding.group_size or topology.local_world_size
    even = topology.world_size % group == 0 and (topology.world_size > 1 or reading.topology is not None)
    if not sharding.hybrid or even or strategy_result.fit is Fit.UNSUPPORTED:
        return {}
    return {
        "sharding.strategy": FieldResult(
            Fit.UNSUPPORTED, "parallelism_config", _NO_GROUPS.format(topology.world_size, group)
        )
    }


def _sharing_words(reading: ReadDocument, topology: Topology, size_result: FieldResult) -> Mapping[str, FieldResult]:
    """What became of ranks that share samples where their groups cannot be written."""
    size, sharding, world = reading.config.parallel.sequence.size, reading.config.sharding, topology.world_size
    if size == 1 or size_result.fit is Fit.UNSUPPORTED:
        return {}
    group = (sharding.group_size or topology.local_world_size) if sharding.hybrid else world
    why = "" if world % size == 0 else _NO_GROUPS.format(world, size)
    if sharding.hybrid and (group % size or group == size):
        why = _NO_SHARDS.format(group, size)
    return {"parallel.sequence.size": FieldResult(Fit.UNSUPPORTED, size_result.key, why)} if why else {}


def text_of(document: Native) -> str:
    """YAML with keys in the order of `accelerate config`."""
    return yaml_text(_sorted(document), old=True, width=4096)


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value, key=str)}
    return [_sorted(item) for item in value] if isinstance(value, list | tuple) else value
