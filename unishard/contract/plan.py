"""What a config makes of a run, decided once: a frozen part for each part of the run, which gets nothing else.

Where a section of the config is all that its owner needs, it is the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from unishard.config import (
    Checkpoint,
    Communication,
    Compile,
    Logging,
    Offload,
    Precision,
    Profile,
    Scheduler,
    SequenceParallel,
    Training,
)
from unishard.config.data_share import DataShare
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.footprint import Footprint
from unishard.contract.model_shape import ModelShape
from unishard.distributed.layout import Layout

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from unishard.contract.adapter import ShardedModel
    from unishard.contract.units import ModelUnits, Unit


class EngineBuilder(Protocol):
    """What a plan knows of its backend: what it is called, what it needs, and that it builds the engine."""

    @property
    def name(self) -> str:
        """What `backend:` says in a config."""
        ...

    @property
    def requires(self) -> Mapping[str, str]:
        """The packages that it imports, and the extra of unishard that installs each."""
        ...

    @property
    def averages_over_holders(self) -> bool:
        """As in `Backend`."""
        ...

    def build(self, model: nn.Module, plan: RunPlan) -> ShardedModel:
        """Build the engine of a plan around a model. Collective."""
        ...


class EngineSpec(Protocol):
    """What an engine is built from, complete: a backend's own frozen type."""

    @property
    def engine(self) -> str:
        """Class that must run the model, such as `DeepSpeedEngine`; `prepare` checks that it does."""
        ...

    @property
    def native(self) -> Native:
        """The settings in the engine's own words."""
        ...


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What is done to the model before it is sharded."""

    classes: Mapping[str, str]
    """The class of each module by name; sharding may change them."""
    shape: ModelShape
    precision: Precision
    offload: Offload
    kept: Sequence[str]
    """Names of the parameters and of the buffers that stay in fp32 in a 16-bit run."""
    replicated: Sequence[str]
    """Names of the parameters that every rank holds whole although the strategy shards; a tied one has one name."""
    units: ModelUnits
    recomputed: Sequence[Unit]
    """Modules that run their forward again in backward."""
    selective: bool
    """Whether they keep the outputs of costly operations."""
    offloaded: Sequence[Unit]
    """Modules whose activations lie in host memory between forward and backward."""
    compiled: Sequence[Unit]
    compile: Compile
    plain: Any
    """What its modules were before: `unishard.engine.model.plain_modules.PlainModules`."""

    @property
    def name(self) -> str:
        """The model's class."""
        return self.classes[""]

    @property
    def casting(self) -> dict[str, nn.Module]:
        """The units that cast their inputs, by what errors call them, such as `layers.0 (LlamaDecoderLayer)`."""
        return {f"{unit.name} ({self.classes[unit.name]})": unit.module for unit in self.units.casting}


class OptimizerPlan(Protocol):
    """Builds the optimizer, once, from pairs of name and trainable parameter: an `OptimizerBuilder`."""

    schedule: Scheduler
    """The section, which counts if the caller has passed no scheduler."""
    from_caller: bool
    """Whether what is built depends on the caller's code, too."""
    optimizer: Optimizer | None
    """What was built, or the caller's own object."""
    scheduler: LRScheduler | None
    """The caller's scheduler, once the optimizer is built."""
    groups: list[list[str]]
    """Names of the parameters in each optimizer group, once the optimizer is built."""
    description: dict[str, Any]
    """What was built, in what must be equal on all ranks: classes, groups, rates."""

    def __call__(self, named: Iterable[tuple[str, Any]]) -> Optimizer:
        """The optimizer over these parameters."""
        ...


@dataclass(frozen=True, slots=True)
class ConfigText:
    """The config as plain data, to be written down."""

    fields: Mapping[str, Any]
    """Each field by its dotted path."""
    given: Mapping[str, Any]
    """The sections with what a file or a script has set."""
    saved: Mapping[str, Any]
    """All sections but `launch`, as JSON, for the manifest of a checkpoint."""


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """What a rank was planned to hold, and what would take less."""

    footprint: Callable[..., Footprint]
    """Plans this rank after changes of the config, such as `offload.optimizer=cpu`."""
    of_activations: Mapping[str, float]
    """Changes that save this part of the activations, by rule of thumb."""
    of_state: Sequence[str]
    """Changes after which the engine may hold less."""


@dataclass(frozen=True, slots=True)
class ObserveSpec:
    """What is measured and traced, and where it goes."""

    logging: Logging
    profile: Profile
    total_steps: int | None
    """Optimizer steps of the training, if that is known."""
    compute: str
    """`precision.compute`, in which a device has its peak."""
    tensor: int
    """Ranks that count the same tokens: `parallel.tensor.size`."""
    sequence: int
    """Ranks that count parts of the same samples: `parallel.sequence.size`."""
    text: ConfigText


@dataclass(frozen=True, slots=True)
class GuardSpec:
    """What is watched for what would go wrong in silence."""

    communication: Communication
    full_weights: bool
    """Whether the module's own parameters are its weights, in full, on every rank and every engine."""
    gathers: bool
    """Whether parameters are gathered for each forward and backward."""
    shards: bool
    """Whether anything is sharded."""
    tested: bool
    """Whether the engine has a tested version; another one may cut tensors otherwise than planned."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All that is known of a run before its engine is built."""

    topology: Topology
    backend: EngineBuilder
    engine: EngineSpec | None
    """None where each rank holds the full model without a sharding engine: inference under a strategy that shards no
    parameters."""
    layout: Callable[[Sequence[Sequence[str]]], Mapping[str, Layout]]
    """Which elements of each parameter each rank holds, by the groups of the optimizer: `Backend.layout`."""
    model: ModelPlan
    optimizer: OptimizerPlan | None
    """None for inference."""
    loop: Training
    sequence: SequenceParallel
    """The section, with the method that suits the model."""
    tensor: int
    """Neighboring ranks that have layers together: `parallel.tensor.size`."""
    data_share: DataShare
    """Which share of the data this rank reads."""
    checkpoint: Checkpoint
    observe: ObserveSpec
    memory: MemorySpec
    guard: GuardSpec
    text: ConfigText
