"""The config of a Trainer: of unishard, or what `fsdp` or `deepspeed` of its TrainingArguments say."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import nn
from transformers import TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from unishard import formats
from unishard.config import Config, value_at
from unishard.config.loading import load
from unishard.config.nested import flat
from unishard.errors import ConfigError, Problem
from unishard.formats import ReadDocument
from unishard.integrations.accelerate.configuring import agreed, config_of, shared_samples, translated
from unishard.integrations.saving import refuse_copies

__all__ = [
    "UnishardArguments",
    "UnishardTrainingArguments",
    "agree_on_schedule",
    "config_for",
    "section_of_deepspeed",
    "without",
]


@dataclass
class UnishardArguments:
    """Gives a class of arguments the field `unishard`: `class Arguments(UnishardArguments, SFTConfig)`."""

    unishard: str | None = field(default=None, metadata={"help": "The config of unishard: a file, or a mapping."})


@dataclass
class UnishardTrainingArguments(UnishardArguments, TrainingArguments):  # type: ignore[misc]
    """TrainingArguments with the field `unishard`."""


_ENGINE = ("backend", "sharding", "precision", "offload", "activation_checkpointing", "communication", "native")
"""What `fsdp` and `deepspeed` of TrainingArguments say; their other arguments are the Trainer's."""
_FSDP = ("fsdp", "fsdp_config", "bf16", "fp16")
_BESIDE_DEEPSPEED = (
    *("bf16", "fp16", "max_grad_norm", "gradient_accumulation_steps", "per_device_train_batch_size", "max_steps"),
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "warmup_steps"),
)
"""Of which `auto` in a config of DeepSpeed takes its values."""


def config_for(args: Any, requested: Config | str | Path | Mapping[str, Any] | None, model: nn.Module | None) -> Config:
    """The config of a Trainer.

    Args:
        args: Its TrainingArguments. What would make transformers build an engine itself is switched off.
        requested: What the Trainer was passed.
        model: Its model, if there is one already.

    Raises:
        ConfigError: There is none, there are several, or it cannot be used.
    """
    source = getattr(args, "unishard", None) if requested is None else requested
    says = [name for name in ("fsdp", "deepspeed") if getattr(args, name)]
    if says and source is not None:
        raise _wrong(says[0], "is set beside a config of unishard; remove it")
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    if args.deepspeed:
        config = _of_deepspeed(args, _ENGINE)
        _require_whole(model)
    elif args.fsdp:
        config = translated({name: getattr(args, name) for name in _FSDP}, "hf", sections=_ENGINE)
    else:
        config = config_of(source, precision)
    shared = shared_samples(getattr(args, "parallelism_config", None), "TrainingArguments.parallelism_config")
    if args.label_smoothing_factor and config.training.loss_chunk_tokens is not None:
        raise _wrong(
            "label_smoothing_factor",
            f"is {args.label_smoothing_factor}, which the Trainer computes of the logits of all tokens; leave it or "
            "training.loss_chunk_tokens out",
        )
    refuse_copies(config.checkpoint.copy_to)
    config = _without_the_trainers(config, args)
    if config.checkpoint.on_existing == "resume":
        what = "resume would not reach the Trainer's loop; remove it, and pass resume_from_checkpoint to train()"
        raise ConfigError([Problem("checkpoint.on_existing", what)])
    _switch_off(args)
    return agreed(
        config,
        {
            "precision.compute": precision,
            "training.micro_batch_size": args.per_device_train_batch_size,
            "training.gradient_accumulation_steps": args.gradient_accumulation_steps,
            "training.gradient_clipping": args.max_grad_norm or None,
            **shared,
        },
    )


def _without_the_trainers(config: Config, args: Any) -> Config:
    """A config without the sections that say what the Trainer itself does by its arguments; they must say the same.

    Those of the optimizer and the schedule stay until it has made these.
    """
    said = formats.read(args.to_dict(), "hf")
    asked = {
        "activation_checkpointing": said.config.activation_checkpointing != "none",
        "compile": said.config.compile.mode != "none",
        "checkpoint": config.checkpoint.dir is not None and config.checkpoint.dir == said.config.checkpoint.dir,
    }
    theirs = [name for name, is_asked in asked.items() if is_asked]
    _agree(config, said, ["training", "optimizer", "scheduler", *theirs])
    if asked["compile"] and "compile" in config.model_fields_set:  # the engine does that
        args.torch_compile = False
        for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO_")]:
            del os.environ[name]
    return without(config, [name for name in theirs if name != "compile"])


def agree_on_schedule(config: Config, args: Any, updates: int) -> None:
    """Check the section `scheduler` of a config against the schedule that the Trainer makes.

    Args:
        config: What the Trainer was given.
        args: Its TrainingArguments.
        updates: Of the training.

    Raises:
        ConfigError: They contradict each other.
    """
    _agree(config, formats.read(args.to_dict() | {"max_steps": updates}, "hf"), ["scheduler"])


def _agree(config: Config, said: ReadDocument, sections: Collection[str]) -> None:
    """Raise ConfigError for each field in these sections of a config of which the arguments say otherwise."""
    given = config.model_dump(exclude_unset=True)
    written = [path for path, _ in flat({name: given[name] for name in sections if name in given})]
    keys = {path: entry for entry in said.entries for path in (*entry.effect.fields, *entry.effect.decides)}
    refused = {path: entry.value for entry in said.entries for path in entry.effect.decides}
    problems = []
    for path in written:
        says, theirs = value_at(config, path), refused.get(path, value_at(said.config, path))
        open_ = path in said.undecided or (path.startswith("training.") and path not in keys)
        if not open_ and says != theirs:
            key = f".{keys[path].key}" if path in keys and keys[path].value == theirs else ""
            problems.append(Problem(path, f"is {says}, but TrainingArguments{key} says {theirs}; write one of them"))
    if problems:
        raise ConfigError(problems)


def without(config: Config, sections: Collection[str]) -> Config:
    """A config without some of its sections."""
    if config.model_fields_set.isdisjoint(sections):
        return config
    given = config.model_dump(exclude_unset=True)
    return load({name: value for name, value in given.items() if name not in sections})


def section_of_deepspeed(args: Any, name: str, max_steps: int | None = None) -> Any:
    """The section `optimizer` or `scheduler` of a config, if the arguments' config of DeepSpeed has one.

    Args:
        args: TrainingArguments.
        name: Of the section.
        max_steps: Updates of the training, where they are known.
    """
    if not args.deepspeed or name not in args.hf_deepspeed_config.config:
        return None
    return getattr(_of_deepspeed(args, ("backend", name), max_steps), name)


def _of_deepspeed(args: Any, sections: Collection[str], max_steps: int | None = None) -> Config:
    """The DeepSpeed config of the arguments, in which transformers has filled in most `auto` values."""
    if mismatches := args.hf_deepspeed_config.mismatches:
        raise _wrong("deepspeed", f"contradicts other arguments: {'; '.join(mismatches)}; write auto there")
    arguments = {name: getattr(args, name) for name in _BESIDE_DEEPSPEED}
    arguments |= {"deepspeed": args.hf_deepspeed_config.config} | (
        {} if max_steps is None else {"max_steps": max_steps}
    )
    return translated(arguments, "hf", sections=sections)


def _require_whole(model: nn.Module | None) -> None:
    if model is not None and any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise _wrong(
            "deepspeed",
            "was there before the model, so transformers has partitioned it with DeepSpeed; build the model before "
            "TrainingArguments, or remove the argument and pass unishard='train.yaml', which `unishard translate "
            "ds_config.json --to unishard -o train.yaml` writes",
        )


def _switch_off(args: Any) -> None:
    """Keep transformers and Accelerate from building FSDP or DeepSpeed themselves."""
    args.fsdp_plugin_args = None
    args.deepspeed_plugin = None
    args.parallelism_config = None
    unset_hf_deepspeed_config()
    state = PartialState()
    if state.distributed_type == DistributedType.DEEPSPEED:
        several = DistributedType.MULTI_CPU if state.device.type == "cpu" else DistributedType.MULTI_GPU
        state.distributed_type = several if state.num_processes > 1 else DistributedType.NO


def _wrong(argument: str, problem: str) -> ConfigError:
    return ConfigError([Problem(f"TrainingArguments.{argument}", problem)])
