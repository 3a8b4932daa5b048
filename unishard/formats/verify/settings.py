"""Effective settings: what a tool does with its config, in the words of unishard's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from unishard.config import Config, value_at
from unishard.formats.names import names

AUTO = "auto"
"""The training script decides."""
KEPT = "kept"
"""Of parameters, until the backward: what FSDP calls SHARD_GRAD_OP, by which tools around FSDP also say ZeRO-2."""
Settings = Mapping[str, Any]
"""Values by dotted field."""
_NO_LIMIT = 1e20
"""A larger bound clips nothing."""

_FIELDS = names(
    "sharding.strategy precision.compute offload.params offload.optimizer training.micro_batch_size "
    "training.gradient_accumulation_steps training.gradient_clipping training.seed optimizer.name optimizer.lr "
    "optimizer.weight_decay optimizer.betas scheduler.name scheduler.warmup_steps scheduler.total_steps"
)


class Effective(NamedTuple):
    """What a tool makes of a document, or why it is unknown."""

    settings: Settings
    consumer: str
    """Who read it, with the version, such as `DeepSpeed 0.19.8`."""
    missing: str = ""
    """Why it was not read: the consumer is not installed, or there is none."""
    refused: str = ""
    """What the consumer says, if it refuses the document."""


def of_config(config: Config) -> dict[str, Any]:
    """What a config of unishard says."""
    settings = {path: value_at(config, path) for path in _FIELDS}
    sharding = config.sharding
    settings["sharding.strategy"] = kept_after_forward(
        sharding.strategy, reshards=sharding.reshard_after_forward is not False
    )
    if config.precision.compute == "fp16":
        settings["precision.loss_scale"] = config.precision.loss_scale
    if config.scheduler.min_lr_ratio == 1:
        settings["scheduler.name"] = "constant"
    if config.sharding.strategy != "no_shard":
        settings["sharding.units"] = (
            sorted(sharding.units) if isinstance(sharding.units, list | tuple) else sharding.units
        )
    return settings


def kept_after_forward(strategy: str, *, reshards: bool) -> str:
    """The strategy, `kept` where a unit's parameters stay from its forward to its backward: FSDP's SHARD_GRAD_OP."""
    return strategy if reshards else strategy.replace("full_shard", KEPT).replace("hybrid_shard", f"hybrid_{KEPT}")


def clipping(value: Any) -> Any:
    """A bound of the gradient norm; None for none."""
    if isinstance(value, int | float) and (value <= 0 or value >= _NO_LIMIT):
        return None
    return value
