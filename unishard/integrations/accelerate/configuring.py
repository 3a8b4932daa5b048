"""The config of an Accelerator: its argument, a file of another tool, or what `accelerate launch` says."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from unishard import formats
from unishard.config import Config
from unishard.config.loading import load
from unishard.config.loading.launched import CONFIG
from unishard.config.nested import Native, flat, nested
from unishard.config.topology import Topology
from unishard.contract.entries import Unreadable
from unishard.contract.render import AUTO
from unishard.contract.rules import Fit
from unishard.errors import ConfigError, Problem
from unishard.formats.accelerate.deepspeed import NO_FILE, opened
from unishard.formats.accelerate.entries import block_of, precision_of
from unishard.formats.accelerate.sequence import BLOCK
from unishard.formats.files.source import Source, open_source
from unishard.formats.hf.sequence import sharing_of
from unishard.integrations.saving import refuse_copies

__all__ = ["FILE", "agreed", "config_of", "shared_samples", "translated", "unsharded_in_one_process", "with_batch_size"]

_logger = logging.getLogger("unishard")

FILE = "ACCELERATE_UNISHARD_CONFIG"
"""Environment variable with the path of a config."""
_ENGINES = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED"}
_DEEPSPEED = {
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config_file",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
}
"""Variables of `accelerate launch`, and the keys of its file (Accelerate 1.15, utils/launch.py)."""
_FSDP = {"FSDP_TRANSFORMER_CLS_TO_WRAP": "fsdp_transformer_layer_cls_to_wrap"}
"""The one whose key is not its name."""
_LOOPS = ("training.micro_batch_size", "training.gradient_accumulation_steps")
"""What the loader and the Accelerator say where a file leaves it open."""
_GROUPS = "ACCELERATE_USE_PARALLELISM_CONFIG"
_SECTIONS = ("bf16", "fp16")
"""Of DeepSpeed's file."""
_SCRIPTS = ("optimizer", "scheduler", "launch")
"""What the script around an Accelerator brings, and what has started it."""


def config_of(source: Config | str | Path | Mapping[str, Any] | None, precision: str | None = None) -> Config:
    """The config that an Accelerator was given, or that the environment names or says.

    Args:
        source: What it was given.
        precision: The argument `mixed_precision`, which fills what a document of Accelerate leaves open.

    Raises:
        ConfigError: There is none, there are two, or it cannot be used.
    """
    launched = [name for name in _ENGINES if os.environ.get(name, "").lower() == "true"]
    source = source if source is not None else os.environ.get(FILE)
    if source is None and not launched and CONFIG in os.environ:
        return load()
    if source is None and not launched:
        problem = (
            "no config; write Accelerator('train.yaml') with one of unishard or of `accelerate config`, set "
            f"{FILE}=train.yaml, or start the script by `unishard launch train.yaml`, or by `accelerate launch` with "
            "FSDP or DeepSpeed"
        )
        raise ConfigError([Problem("Accelerator", problem)])
    if source is not None and launched:
        problem = "is set beside a config of unishard; start the script without FSDP and DeepSpeed, as with torchrun"
        raise ConfigError([Problem(launched[0], problem)])
    cfg = translated(_of_launch(launched[0], precision)) if source is None else _of_source(source, precision)
    for name in launched:  # otherwise Accelerate would build that engine itself
        del os.environ[name]
    return cfg


def _of_source(source: Config | str | Path | Mapping[str, Any], precision: str | None) -> Config:
    if isinstance(source, Config):
        return source
    reading = formats.read(source)
    if reading.format == "unishard":
        return load(source)
    return translated(_filled(reading.source, precision) if reading.format == "accelerate" else source)


def _filled(source: Source, precision: str | None) -> Source:
    """A document as Accelerate completes it by its argument (utils/dataclasses.py, set_mixed_precision)."""
    data, block = source.data, block_of(source.data, "deepspeed_config")
    name = block.get("deepspeed_config_file")
    if precision not in _SECTIONS:
        return source
    if name in NO_FILE:  # the launcher says `no` where it was told nothing
        return source._replace(data={**data, "mixed_precision": precision}) if precision_of(data) == "no" else source
    document = opened(name, source.folder) or {}
    section, decided = block_of(document, precision), [block_of(document, word).get("enabled") for word in _SECTIONS]
    if not document or True in decided or (precision in document and section.get("enabled") != AUTO):
        return source
    whole = {**document, precision: {**section, "enabled": True}}
    return source._replace(data={**data, "deepspeed_config": {**block, "deepspeed_config_file": whole}})


def translated(
    source: str | Path | Mapping[str, Any] | Source, from_: str | None = None, sections: Collection[str] = ()
) -> Config:
    """A config from a document of another tool, without what the script around it brings.

    Args:
        source: The document.
        from_: Its format; left out, it is recognised.
        sections: The sections to keep; by default all but those of an optimizer and a schedule.

    Raises:
        ConfigError: One of its keys is not supported; says which.
    """
    outcome = formats.translate(source, "unishard", from_=from_)
    name = outcome.reading.source.name
    kept = {part for part in outcome.document if (part in sections if sections else part not in _SCRIPTS)}
    settings = {field: value for field, value in flat(outcome.document) if field.partition(".")[0] in kept}
    open_ = {field: unknown for field, unknown in outcome.reading.undecided.items() if field in settings}
    keys = {field: entry.key for entry in outcome.reading.entries for field in entry.effect.fields}
    refused = [Problem(item.key, item.note, name) for item in outcome.of(Fit.UNSUPPORTED)]
    refused += [
        Problem(keys.get(field, field), f"needs a value here: otherwise {unknown.who} says it", name)
        for field, unknown in open_.items()
        if field not in _LOOPS
    ]
    if refused:
        raise ConfigError(refused)
    for item in outcome.of(Fit.APPROXIMATE):
        _logger.warning("%s: %s", item.key, item.note)
    return load(nested({field: value for field, value in settings.items() if field not in open_}))


def _of_launch(engine: str, precision: str | None) -> Source:
    """The config file of `accelerate launch`, from the variables that it sets."""
    kind, environment = _ENGINES[engine], os.environ
    precision = precision or environment.get("ACCELERATE_MIXED_PRECISION")
    document: Native = {"distributed_type": kind, **_groups_of_launch()}
    if kind == "DEEPSPEED":
        settings = {key: environment[name] for name, key in _DEEPSPEED.items() if name in environment}
        document["deepspeed_config"] = {key: _value(text) for key, text in settings.items() if text != "none"}
        name = settings.get("deepspeed_config_file", "")
    else:
        settings = {
            _FSDP.get(name, name.lower()): text for name, text in environment.items() if name.startswith("FSDP_")
        }
        document["fsdp_config"] = {key: _value(text) for key, text in settings.items() if text != "None"}
        name = ""
    return _filled(open_source(document)._replace(name=name), precision)


def _groups_of_launch() -> Native:
    """The block `parallelism_config`, which Accelerate must not see then, since it would build these groups itself."""
    if os.environ.pop(_GROUPS, "false").lower() != "true":
        return {}
    prefix = f"{BLOCK.upper()}_"
    named = {name.lower(): text for name, text in os.environ.items() if name.startswith(prefix) and text != "None"}
    return {"num_processes": Topology.from_environment().world_size, BLOCK: {k: _value(v) for k, v in named.items()}}


def _value(text: str) -> Any:
    """A value as the file has it: a number or a boolean where it is one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def agreed(cfg: Config, arguments: Mapping[str, Any]) -> Config:
    """The config, with the settings of a framework's own arguments added.

    Args:
        cfg: The config.
        arguments: Values by field; None for fields that they do not set.

    Raises:
        ConfigError: They contradict the config, or it sets `checkpoint.copy_to`.
    """
    refuse_copies(cfg.checkpoint.copy_to)
    written = dict(flat(cfg.model_dump(exclude_unset=True)))
    arguments = {field: value for field, value in arguments.items() if value is not None}
    for field, value in arguments.items():
        if written.get(field, value) != value:
            problem = f"is {written[field]}, but the framework's arguments say {value}; write it in one place"
            raise ConfigError([Problem(field, problem)])
    return cfg.override(*(f"{field}={value}" for field, value in arguments.items() if field not in written))


def shared_samples(given: Any, name: str) -> Mapping[str, Any]:
    """The fields of the config that an object `ParallelismConfig` says.

    Args:
        given: It, or None.
        name: Of the argument that holds it.

    Raises:
        ConfigError: unishard has nothing like it, or the ranks are others.
    """
    if given is None:
        return {}
    values = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    try:
        return sharing_of(values, Topology.from_environment().world_size)
    except Unreadable as error:
        raise ConfigError([Problem(name, str(error))]) from None


def with_batch_size(cfg: Config, prepared: Iterable[Any], shared_by: int) -> Config:
    """The config with the micro-batch of the loaders, as Accelerate takes it, where it is left open.

    Args:
        cfg: The config.
        prepared: What a script prepares.
        shared_by: The ranks that share each batch of a loader.
    """
    sizes = [each.batch_size for each in prepared if isinstance(each, DataLoader) and each.batch_size is not None]
    if not sizes or "micro_batch_size" in cfg.training.model_fields_set:
        return cfg
    return cfg.override(f"training.micro_batch_size={max(1, min(sizes) // shared_by)}")


def unsharded_in_one_process(cfg: Config) -> Config:
    """The config for a process that no launcher has started. Nothing is sharded, so its model stays a plain module.

    A script may then read, copy and save the model after training, as with the framework itself. A model in another
    dtype than its weights, or outside the device's memory, is not plain.
    """
    numbers, offload = cfg.precision, cfg.offload
    several = dist.is_initialized() and dist.get_world_size() > 1
    plain = numbers.compute == numbers.master == "fp32" and offload.params == offload.optimizer == "none"
    if several or _launcher() != "python" or not plain or "native" in cfg.model_fields_set:
        return cfg
    try:
        unsharded = cfg.override("sharding.strategy=no_shard")
    except ConfigError:  # another field means nothing without shards
        return cfg
    if cfg.sharding.strategy != "no_shard":
        _logger.info("one process without a launcher: sharding.strategy is no_shard, not %s", cfg.sharding.strategy)
    return unsharded


@cache
def _launcher() -> str:
    """What started this process: later Accelerate may have set RANK itself."""
    return Topology.from_environment().launcher
