"""What the launcher's environment is to a Trainer: the engine's arguments that it would have been given otherwise.

transformers 5.23, trainer.py (`propagate_args_to_deepspeed`): the config that Accelerate makes is filled and checked
like one that `deepspeed` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.contract.entries import Path
from unishard.contract.render import AUTO
from unishard.errors import ConfigError
from unishard.formats.accelerate.deepspeed import NAMES, NO_FILE
from unishard.formats.accelerate.deepspeed_file import FILE, opened
from unishard.formats.accelerate.entries import block_of, kind_of, precision_of
from unishard.formats.source import Source

__all__ = ["for_trainer"]


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
    word = precision_of(source.data)
    return {
        "deepspeed": {
            "zero_optimization": {"stage": block.get("zero_stage", 2)},
            "train_micro_batch_size_per_gpu": AUTO,
            "gradient_accumulation_steps": block.get("gradient_accumulation_steps", AUTO),
            NAMES["gradient_clipping"]: AUTO,
            **({word: {"enabled": True}} if word in ("bf16", "fp16") else {}),
        }
    }, None
