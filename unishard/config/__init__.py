"""The schema: one tree of frozen sections that every backend understands.

Every field does something, and no field is named after one engine's setting.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field

from unishard.config.activation_checkpointing import ActivationCheckpointing
from unishard.config.checkpoint import Checkpoint
from unishard.config.communication import Communication
from unishard.config.compile import Compile
from unishard.config.launch import LaunchSettings
from unishard.config.logging import Logging
from unishard.config.offload import Offload
from unishard.config.optimizer import Optimizer, ParameterGroup
from unishard.config.parallel import ExpertParallel, Parallel, SequenceParallel, TensorParallel
from unishard.config.precision import Precision
from unishard.config.profile import Profile
from unishard.config.quantization import Quantization
from unishard.config.relevance import OffAt
from unishard.config.scheduler import Scheduler
from unishard.config.section import CROSS_FIELD, Section, items_of, leaves, value_at
from unishard.config.sharding import GATHERING, Sharding
from unishard.config.spellings import lower
from unishard.config.training import Training
from unishard.errors import ConfigError, Problem

__all__ = [
    "CROSS_FIELD",
    "Checkpoint",
    "Communication",
    "Compile",
    "Config",
    "ExpertParallel",
    "LaunchSettings",
    "Logging",
    "Offload",
    "Optimizer",
    "Parallel",
    "ParameterGroup",
    "Precision",
    "Profile",
    "Quantization",
    "Scheduler",
    "Section",
    "SequenceParallel",
    "Sharding",
    "TensorParallel",
    "Training",
    "expect_config",
    "items_of",
    "leaves",
    "value_at",
]


class Config(Section):
    """How a model is trained: the engine, what it shards, in which precision, and the loop around it."""

    backend: Annotated[str, BeforeValidator(lower)] = Field(default="fsdp")
    """The engine: `fsdp` (PyTorch), `deepspeed`, or any installed plugin. Changing this word changes nothing else."""
    sharding: Sharding = Field(default_factory=Sharding.model_construct)
    """What is sharded across the ranks."""
    precision: Precision = Field(default_factory=Precision.model_construct)
    """Dtypes."""
    quantization: Quantization = Field(default_factory=Quantization.model_construct)
    """In how few bits the weights of a frozen base are stored, for QLoRA."""
    offload: Offload = Field(default_factory=Offload.model_construct)
    """What is kept in host memory or on NVMe."""
    activation_checkpointing: Annotated[ActivationCheckpointing, OffAt("none")] = Field(default="none")
    """Which modules keep only their inputs and rerun their forward in backward. It saves memory and costs time.

    `full`: each of the model's repeated blocks. `selective`: the same, but the outputs of matrix products with weights,
    of convolutions and of fused attention are kept, so only cheap operations are recomputed. A list of class names: the
    modules of these classes. The random state is restored before a recomputation, so losses do not change.
    """
    parallel: Parallel = Field(default_factory=Parallel.model_construct)
    """What several ranks do together, besides sharding: long sequences, experts of a mixture."""
    training: Training = Field(default_factory=Training.model_construct)
    """The loop."""
    optimizer: Optimizer = Field(default_factory=Optimizer.model_construct)
    """The optimizer."""
    scheduler: Scheduler = Field(default_factory=Scheduler.model_construct)
    """The learning rate schedule."""
    communication: Communication = Field(default_factory=Communication.model_construct)
    """Bucket sizes, prefetch, overlap and checks of collectives."""
    compile: Compile = Field(default_factory=Compile.model_construct)
    """`torch.compile`."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint.model_construct)
    """What is saved, when and where."""
    logging: Logging = Field(default_factory=Logging.model_construct)
    """What is logged, how often and where."""
    profile: Profile = Field(default_factory=Profile.model_construct)
    """Which optimizer steps are traced."""
    launch: LaunchSettings = Field(default_factory=LaunchSettings.model_construct)
    """How `unishard launch` starts the ranks."""
    strict: bool = Field(default=False)
    """Whether an approximate translation is an error instead of a line in the report."""
    native: dict[str, dict[str, Any]] = Field(default={})
    """Settings of one engine that have no field here, keyed by backend: `native: {deepspeed: {...}}`. Merged last into
    what that backend generates, validated by it, and listed in the report."""

    def override(self, *changes: str) -> Self:
        """Return a config with some fields changed; this one stays as it is.

        Args:
            changes: Such as `"training.micro_batch_size=4"`, `"sharding=full_shard"`; the value is YAML, the last one
                wins.

        Raises:
            ConfigError: A field or a value is invalid. Lists every problem.
        """
        overridden: Self = self.reader.override(self, changes)
        return overridden

    def _problems(self) -> Iterator[tuple[str, str]]:
        strategy, offload = self.sharding.strategy, self.offload
        if offload.optimizer != "none" and strategy == "no_shard":
            yield (
                "offload.optimizer",
                f"{offload.optimizer} needs a sharded optimizer; choose shard_optimizer, shard_grad_op or full_shard",
            )
        if offload.optimizer == "nvme" and self.optimizer.name == "muon":
            yield (
                "offload.optimizer",
                "nvme needs an optimizer that updates each element from its own state, not muon; choose cpu, or "
                "optimizer.name: adamw",
            )
        if offload.params != "none" and strategy not in GATHERING:
            yield (
                "offload.params",
                f"{offload.params} needs sharded parameters, not {strategy}; set sharding.strategy to full_shard",
            )
        if offload.activations != "none" and self.activation_checkpointing == "selective":
            yield (
                "offload.activations",
                "cpu does not reach what activation_checkpointing selective keeps inside each block, which would stay "
                "on the device; set activation_checkpointing to full or none",
            )
        if offload.activations != "none" and self.compile.mode == "full":
            yield (
                "offload.activations",
                "cpu works on each block, and compile full makes one graph of the model that keeps everything until "
                "its end; set compile to per_block",
            )
        if self.precision.compute == "fp16" and self.training.nonfinite == "ignore":
            yield "training.nonfinite", "ignore would apply fp16 gradients that overflowed; write skip or raise"
        if self.training.loss_chunk_tokens is not None and self.compile.mode == "full":
            yield (
                "training.loss_chunk_tokens",
                "is not supported with compile.mode full, which compiles the loss too; write per_block",
            )
        if self.parallel.slices and self.optimizer.name == "adamw_8bit":
            what = "is not supported with optimizer adamw_8bit, which needs whole tensors; choose another optimizer"
            yield self.parallel.slices, what
        if self.activation_checkpointing == []:
            yield "activation_checkpointing", "is empty; name at least one class, or write full or none"


def expect_config(value: object) -> None:
    """Check that an argument is a config.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(value, Config):
        raise ConfigError(
            [Problem("", f"expected a unishard.Config, got {type(value).__name__}; load one with unishard.load(path)")]
        )
