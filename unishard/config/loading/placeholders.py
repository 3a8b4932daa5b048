"""Placeholders in a unishard file for values that still need a decision: `${training.micro_batch_size}`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

STAND_INS: Mapping[str, Any] = {
    "scheduler.total_steps": 2**40,
    "scheduler.warmup_steps": 2,
    "checkpoint.dir": "checkpoints",
}
"""Temporary values of undecided fields that others depend on; any other field keeps its default."""

Needs = Mapping[str, tuple[Any, ...]]
"""Fields, one of which must have one of these values."""

_FP16: Needs = {"precision.compute": ("fp16",)}
_GATHERED: Needs = {"sharding.strategy": ("full_shard", "hybrid_shard")}
_SHARDED: Needs = {
    "sharding.strategy": ("full_shard", "shard_grad_op", "shard_optimizer", "hybrid_shard", "hybrid_shard_grad_op")
}
_ENDING: Needs = {"scheduler.name": ("linear", "cosine")}
_OFFLOADED: Needs = {"offload.optimizer": ("cpu", "nvme"), "offload.params": ("cpu", "nvme")}
_BY_FIELD: Mapping[str, Needs] = {
    "precision.loss_scale": _FP16,
    "precision.initial_loss_scale": _FP16,
    "precision.loss_scale_growth_interval": _FP16,
    "sharding.reshard_after_forward": _GATHERED,
    "communication.prefetch_bucket_size": _GATHERED,
    "sharding.group_size": {"sharding.strategy": ("hybrid_shard", "hybrid_shard_grad_op")},
    "sharding.units": _SHARDED,
    "sharding.min_unit_params": _SHARDED,
    "quantization.double_quantization": {"quantization.type": ("nf4", "fp4")},
    "quantization.skip_modules": {"quantization.type": ("nf4", "fp4", "int8")},
    "scheduler.total_steps": _ENDING,
    "scheduler.min_lr_ratio": _ENDING,
    "offload.pin_memory": _OFFLOADED,
    "offload.nvme_path": {"offload.params": ("nvme",), "offload.optimizer": ("nvme",)},
}
_OF_COMPUTE = ("precision.master", "precision.reduce", "precision.accumulate")
_PLACEHOLDER = re.compile(r"\$\{([a-z_]+(?:\.[a-z_]+)*)\}")


def placeholder(field: str) -> str:
    """The placeholder of a field."""
    return f"${{{field}}}"


def undecided_in(value: Any) -> str | None:
    """The field of a placeholder; None for anything else."""
    match = _PLACEHOLDER.fullmatch(value) if isinstance(value, str) else None
    return match.group(1) if match else None


def needs(field: str, value: Any) -> Needs:
    """What a value of a field needs, without which the schema refuses it; empty for nothing."""
    if field in _OF_COMPUTE and value in ("bf16", "fp16"):
        return {"precision.compute": (value,)}
    return _BY_FIELD.get(field, {})


def stand_ins(values: Mapping[str, Any], undecided: Collection[str]) -> dict[str, Any]:
    """A value for each undecided field that others depend on, so that what is decided about these can be kept.

    Args:
        values: The decided fields.
        undecided: The others, which the user must decide.
    """
    stand_in_values = {field: value for field, value in STAND_INS.items() if field in undecided}
    for field, value in (stand_in_values | dict(values)).items():
        wanted = needs(field, value)
        if any(values.get(switch) in accepted for switch, accepted in wanted.items()):
            continue
        switch = next((switch for switch in wanted if switch in undecided), None)
        if switch:
            stand_in_values.setdefault(switch, wanted[switch][0])
    return stand_in_values
