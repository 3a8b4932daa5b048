"""The schema: one tree of frozen sections that every backend understands.

No field exists that does nothing, and none is spelt in one engine's dialect.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from unishard.config.activation_checkpointing import ActivationCheckpointing, Compile
from unishard.config.checkpoint import Checkpoint
from unishard.config.communication import Communication
from unishard.config.offload import Offload
from unishard.config.optimizer import Optimizer, ParameterGroup
from unishard.config.precision import Precision
from unishard.config.scheduler import Scheduler
from unishard.config.section import CROSS_FIELD, Section, items_of, leaves, refuse, value_at
from unishard.config.sharding import Sharding
from unishard.config.training import Training
from unishard.errors import ConfigError, Problem

__all__ = [
    "CROSS_FIELD",
    "Checkpoint",
    "Communication",
    "Compile",
    "Config",
    "Offload",
    "Optimizer",
    "ParameterGroup",
    "Precision",
    "Scheduler",
    "Section",
    "Sharding",
    "Training",
    "expect_config",
    "items_of",
    "leaves",
    "value_at",
]


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


class Config(Section):
    """How a model is trained: the engine, what it shards, in which precision, and the loop around it."""

    backend: Annotated[str, BeforeValidator(_lower)] = Field(default="fsdp")
    """The engine: `fsdp` (PyTorch), `deepspeed`, or any installed plugin. Changing this word changes nothing else."""
    sharding: Sharding = Field(default_factory=Sharding)
    """What is partitioned between the ranks."""
    precision: Precision = Field(default_factory=Precision)
    """Number formats."""
    offload: Offload = Field(default_factory=Offload)
    """What lives in host memory."""
    activation_checkpointing: ActivationCheckpointing = Field(default="none")
    """Which modules keep their inputs alone and run their forward again in backward, which saves memory and costs time.

    `full`: each of the model's repeated blocks. `selective`: the same, but the results of matrix products with weights, of
    convolutions and of fused attention are kept, so that only cheap operations run again. A list of class names: the modules of these
    classes. Random numbers are drawn again alike, so losses do not change.
    """
    training: Training = Field(default_factory=Training)
    """The loop."""
    optimizer: Optimizer = Field(default_factory=Optimizer)
    """The optimizer."""
    scheduler: Scheduler = Field(default_factory=Scheduler)
    """The learning rate over time."""
    communication: Communication = Field(default_factory=Communication)
    """Collectives."""
    compile: Compile = Field(default_factory=Compile)
    """`torch.compile`."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """What is saved, when and where."""
    strict: bool = Field(default=False)
    """Whether an approximation is an error instead of a line in the report."""
    native: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of one engine that have no field here, by backend: `native: {deepspeed: {...}}`. Merged last into what that
    backend generates, validated by it, and listed in the report."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        strategy, within_group, offload = self.sharding.strategy, self.sharding.within_group, self.offload
        problems: list[tuple[str, str]] = []
        if offload.optimizer != "none" and strategy == "no_shard":
            what = f"{offload.optimizer} needs a sharded optimizer; choose shard_optimizer, shard_grad_op or full_shard"
            problems.append(("offload.optimizer", what))
        if offload.params != "none" and within_group != "full_shard":
            what = f"{offload.params} needs sharded parameters, not {strategy}; set sharding.strategy to full_shard"
            problems.append(("offload.params", what))
        if self.precision.compute == "fp16" and self.training.nonfinite == "ignore":
            problems.append(("training.nonfinite", "ignore would make updates with overflown fp16 gradients; write skip or raise"))
        if within_group != "full_shard" and "prefetch_bucket_size" in self.communication.model_fields_set:
            problems.append(
                (
                    "communication.prefetch_bucket_size",
                    f"has no meaning with {strategy}, which gathers nothing ahead; remove it or choose full_shard",
                )
            )
        if self.activation_checkpointing == []:
            problems.append(("activation_checkpointing", "is empty; name at least one class, or write full or none"))
        refuse(problems)
        return self


def expect_config(value: object) -> None:
    """Check what a caller passes where a config is wanted.

    Raises:
        ConfigError: It is something else.
    """
    if not isinstance(value, Config):
        raise ConfigError([Problem("", f"a unishard.Config is needed, got {type(value).__name__}; load one with unishard.load(path)")])
