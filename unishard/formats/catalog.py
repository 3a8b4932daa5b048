"""Which formats there are, and which of them a document is in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import Any, cast

from unishard.config import Config
from unishard.errors import ConfigError, Problem
from unishard.formats.format import Format
from unishard.formats.sections import ARGUMENTS, SURE
from unishard.formats.source import Source

__all__ = ["NAMES", "get", "loudest", "mentions", "recognise"]

_SIGNS: Mapping[str, Mapping[str, int]] = {
    "unishard": {
        "backend": 3,
        "sharding": 3,
        "offload": 2,
        "precision.compute": 3,
        "activation_checkpointing": 1,
        "native": 3,
        "training": 1,
        "training.micro_batch_size": 3,
        "training.gradient_clipping": 3,
        "optimizer.name": 1,
        "scheduler.name": 1,
        "communication": 2,
        "strict": 1,
    },
    "deepspeed": {
        "zero_optimization": 3,
        "train_micro_batch_size_per_gpu": 3,
        "train_batch_size": 3,
        "zero_allow_untested_optimizer": 3,
        "zero_force_ds_cpu_optimizer": 3,
        "steps_per_print": 2,
        "wall_clock_breakdown": 2,
        "fp16": 1,
        "bf16": 1,
        "fp16.enabled": 2,
        "bf16.enabled": 2,
        "bfloat16": 2,
        "gradient_clipping": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": 1,
        "optimizer.type": 2,
        "optimizer.params": 2,
        "scheduler": 1,
        "scheduler.type": 2,
        "activation_checkpointing": 1,
        "communication_data_type": 3,
        "compression_training": 2,
        "autotuning": 2,
        "data_efficiency": 2,
        "tensorboard": 1,
        "aio": 2,
        "compile.deepcompile": 3,
    },
    "accelerate": {
        "distributed_type": 4,
        "compute_environment": 4,
        "fsdp_config": 1,
        "deepspeed_config": 3,
        "megatron_lm_config": 3,
        "parallelism_config": 3,
        "num_machines": 2,
        "machine_rank": 2,
        "main_process_port": 2,
        "main_training_function": 3,
        "same_network": 2,
        "rdzv_backend": 2,
        "mixed_precision": 1,
        "num_processes": 2,
        "downcast_bf16": 3,
    },
    "hf": {
        "per_device_train_batch_size": 5,
        "per_device_eval_batch_size": 3,
        "learning_rate": 1,
        "lr_scheduler_type": 2,
        "num_train_epochs": 2,
        "output_dir": 1,
        "fsdp": 2,
        "fsdp_config": 1,
        "deepspeed": 1,
        **{f"{name}.{SURE}": 9 for name in ARGUMENTS},
        "max_grad_norm": 1,
        "gradient_accumulation_steps": 1,
        "optim": 2,
        "lr_scheduler_kwargs": 2,
        # A file that `fsdp_config` names holds its keys alone.
        "fsdp_transformer_layer_cls_to_wrap": 2,
        "transformer_layer_cls_to_wrap": 2,
        "fsdp_sharding_strategy": 2,
        "fsdp_auto_wrap_policy": 2,
        "auto_wrap_policy": 2,
        "fsdp_state_dict_type": 2,
        "fsdp_offload_params": 1,
        "reshard_after_forward": 2,
        "fsdp_reshard_after_forward": 2,
        "cpu_ram_efficient_loading": 2,
        "xla_fsdp_v2": 2,
        "xla": 2,
    },
    "lightning": {
        "strategy": 4,
        "accelerator": 2,
        "devices": 2,
        "num_nodes": 1,
        "trainer.strategy": 5,
        "trainer.accelerator": 4,
        "trainer.devices": 4,
        "trainer.precision": 3,
        "trainer.max_epochs": 2,
        "trainer.max_steps": 2,
        "trainer.accumulate_grad_batches": 4,
        "trainer.gradient_clip_val": 4,
        "fit.trainer": 5,
        "lightning.trainer": 5,
        "fabric.strategy": 5,
        "seed_everything": 3,
        "gradient_clip_val": 3,
        "accumulate_grad_batches": 4,
        "class_path": 4,
        "init_args": 3,
    },
    "axolotl": {
        "base_model": 5,
        "sequence_len": 4,
        "micro_batch_size": 3,
        "datasets": 3,
        "val_set_size": 3,
        "adapter": 2,
        "deepspeed": 1,
        "fsdp": 1,
        "fsdp_config": 1,
        "learning_rate": 1,
        "num_epochs": 2,
    },
    "composer": {
        "max_seq_len": 2,
        "device_train_microbatch_size": 5,
        "device_train_grad_accum": 5,
        "global_train_batch_size": 5,
        "device_eval_batch_size": 4,
        "max_duration": 4,
        "train_loader": 4,
        "train_dataset": 2,
        "schedulers": 2,
        "fsdp_config": 1,
        "run_name": 1,
        "parallelism_config": 1,
        "parameters": 2,
        "integrations": 2,
        "callbacks": 2,
        "algorithms": 2,
        "loggers": 2,
        "scheduler.t_warmup": 3,
        "scheduler.alpha_f": 2,
        "parameters.max_duration": 9,
        "parameters.train_loader": 9,
        "parameters.fsdp_config": 9,
    },
    "torchtitan": {
        "parallelism": 5,
        "job": 3,
        "training": 1,
        "training.steps": 2,
        "training.seq_len": 2,
        "training.local_batch_size": 3,
        "lr_scheduler": 3,
        "activation_checkpoint": 3,
        "optimizer": 1,
        "model": 1,
        "model.flavor": 3,
    },
}
"""Dotted keys that speak for a format, and how loudly. The format with the largest sum is the one."""

_STRANGE: Mapping[str, tuple[str, ...]] = {
    "Hydra, such as verl's": ("hydra", "_target_", "actor_rollout_ref"),
    "nanotron": ("data_stages", "lighteval"),
    "LLaMA-Factory 1": ("dist_config", "kernel_config"),
    "LitGPT": ("train.lr_warmup_steps", "train.max_tokens", "train.tie_embeddings"),
}
"""Dotted keys of tools that are trained otherwise, whose configs unishard does not read."""

_OF_HYDRA = ("_self_", "hydra/", "override hydra/", "override /hydra/")
"""What a list of defaults may name without another file of the user's."""

_LIGHTNING = ("accelerator", "accumulate_grad_batches", "gradient_clip_val", "devices", "val_check_interval")
"""Arguments of Lightning's Trainer that no other trainer has."""

_OURS = 10
"""How loudly a file speaks for unishard in which each key is a field of its config."""

_LOUD = 3
_ENOUGH = 2
"""A key that several tools have says too little."""

NAMES = tuple(_SIGNS)
"""The formats, by the word after `--from` and `--to`."""


@cache
def get(name: str) -> Format:
    """The format of this name.

    Raises:
        ConfigError: There is no such format.
    """
    if name not in NAMES:
        near = get_close_matches(name, NAMES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(NAMES)}"
        raise ConfigError([Problem("", f"no format named {name!r}; {hint}")])
    return cast(Format, import_module(f"unishard.formats.{name}").FORMAT)


def recognise(source: Source) -> Format:
    """The format that a document is in, from its keys.

    Raises:
        ConfigError: It is in none of them, or as likely in one as in another.
    """
    if _composes(source.data) and (_trains_with_lightning(source.data) or any(key in source.data for key in _LIGHTNING)):
        what = "is a config of Hydra in parts (defaults), which unishard does not read; translate what the script prints with --cfg job"
        raise ConfigError([Problem("", what, source.name)])
    if stranger := _stranger(source.data):
        what = f"is a config of {stranger}, which unishard does not read; write a new config with `unishard init`"
        raise ConfigError([Problem("", what, source.name)])
    loudness = _loudnesses(source.data)
    name, most = loudest(source)
    rivals = [name for name in NAMES if loudness[name] == most]
    if most >= _ENOUGH and len(rivals) == 1:
        return get(name)
    keys = ", ".join(list(source.data)[:5]) or "none"
    if most >= _ENOUGH:
        what = f"could be in any of the formats {', '.join(rivals)} (its keys: {keys}); say which (unishard translate --from)"
    else:
        what = f"is in no format that unishard knows (its keys: {keys}); say it (unishard translate --from), one of {', '.join(NAMES)}"
    raise ConfigError([Problem("", what, source.name)])


def loudest(source: Source) -> tuple[str, int]:
    """The format that the keys of a document speak for most, and how loudly; 0 for not at all."""
    loudness = _loudnesses(source.data)
    best = max(loudness, key=lambda name: loudness[name])
    return best, 0 if _stranger(source.data) else loudness[best]


def _loudnesses(data: Mapping[str, Any]) -> dict[str, int]:
    loudness = {name: _loudness(signs, data) for name, signs in _SIGNS.items()}
    loudness["unishard"] += _OURS * _is_ours(data)
    return loudness


def _is_ours(data: Mapping[str, Any]) -> bool:
    """Whether every key is a field of the config, which no other tool's file can be by chance."""
    known = Config.model_fields
    sections = ((known[key].annotation, value) for key, value in data.items() if key in known and isinstance(value, Mapping))
    inner = all(set(value) <= set(getattr(kind, "model_fields", value)) for kind, value in sections)
    return bool(data) and set(data) <= set(known) and inner


def _stranger(data: Mapping[str, Any]) -> str | None:
    """The tool that a document is for, if it is one that unishard knows not to read."""
    if _composes(data):
        return next(iter(_STRANGE))
    if _trains_with_lightning(data):
        return None
    return next((tool for tool, keys in _STRANGE.items() if any(_has(data, key.split(".")) for key in keys)), None)


def _composes(data: Mapping[str, Any]) -> bool:
    """Whether Hydra builds the config of this file and of others, which the file alone does not hold."""
    defaults = data.get("defaults")
    return isinstance(defaults, list) and any(not str(_group(item)).startswith(_OF_HYDRA) for item in defaults)


def _group(item: Any) -> Any:
    return next(iter(item), "") if isinstance(item, Mapping) else item


def _trains_with_lightning(data: Mapping[str, Any]) -> bool:
    """Whether Hydra makes a Trainer of Lightning's from the file, or of its `trainer`."""
    named = str(data.get("_target_", "")).rpartition(".")[2]
    trainer = data.get("trainer")
    return named in ("Trainer", "Fabric") or (isinstance(trainer, Mapping) and any(key in trainer for key in _LIGHTNING))


def mentions(text: str) -> bool:
    """Whether a text that cannot be read has a key that speaks for a format."""
    loud = (key for signs in _SIGNS.values() for key, weight in signs.items() if weight >= _LOUD and "." not in key)
    return re.search(rf"\b({'|'.join(dict.fromkeys(loud))})[\"']?\s*[:=]", text) is not None


def _loudness(signs: Mapping[str, int], data: Mapping[str, Any]) -> int:
    return sum(weight for key, weight in signs.items() if _has(data, key.split(".")))


def _has(data: Any, path: Sequence[str]) -> bool:
    for name in path:
        if not isinstance(data, Mapping) or name not in data:
            return False
        data = data[name]
    return True
