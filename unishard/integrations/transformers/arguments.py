"""The config of a Trainer: of unishard, or what `fsdp` or `deepspeed` of its TrainingArguments say."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import nn
from transformers import TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from unishard.config import Config
from unishard.errors import ConfigError, Problem
from unishard.integrations.accelerate.configuring import agreed, config_of, shared_samples, translated

__all__ = ["UnishardArguments", "UnishardTrainingArguments", "config_for", "section_of_deepspeed"]


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
    if args.deepspeed:
        config = _of_deepspeed(args, _ENGINE)
        _require_whole(model)
    elif args.fsdp:
        config = translated({name: getattr(args, name) for name in _FSDP}, "hf", sections=_ENGINE)
    else:
        config = config_of(source)
    shared = shared_samples(getattr(args, "parallelism_config", None), "TrainingArguments.parallelism_config")
    if args.label_smoothing_factor and config.training.loss_chunk_tokens is not None:
        raise _wrong(
            "label_smoothing_factor",
            f"is {args.label_smoothing_factor}, which the Trainer computes of the logits of all tokens; leave it or "
            "training.loss_chunk_tokens out",
        )
    _switch_off(args)
    return agreed(
        config,
        {
            "precision.compute": "bf16" if args.bf16 else "fp16" if args.fp16 else None,
            "training.gradient_accumulation_steps": args.gradient_accumulation_steps,
            "training.gradient_clipping": args.max_grad_norm or None,
            **shared,
        },
    )


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
