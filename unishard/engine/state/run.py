"""The parts of a run that a checkpoint contains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from unishard.config import Checkpoint, Training
from unishard.contract.adapter import ShardedModel
from unishard.engine.loop.accumulation import Accumulation
from unishard.engine.loop.batching import Batching
from unishard.engine.loop.buffers import Buffers
from unishard.engine.loop.call_order import CallOrder
from unishard.engine.state.tensors import StateTensors
from unishard.observe.observer import Observers


@dataclass(frozen=True, slots=True)
class Run:
    """A run, to take a snapshot of or to restore a checkpoint into."""

    training: Training
    tensor: int
    """Neighboring ranks that draw the same random numbers, because they have layers together."""
    checkpoint: Checkpoint
    text: Mapping[str, Any]
    """The config, for the manifest."""
    packages: Sequence[str]
    """Packages whose versions the manifest has."""
    adapter: ShardedModel
    order: CallOrder
    tensors: StateTensors
    buffers: Buffers
    batching: Batching
    observers: Observers
    accumulation: Accumulation | None
    """None for inference."""
    model_class: str
    """Class of the model before it was sharded."""
    group_names: Sequence[Sequence[str]]
    """Names of the parameters in each group of the optimizer."""

    @property
    def torch_optimizer(self) -> Optimizer | None:
        """What makes the updates; None for inference."""
        return None if self.accumulation is None else self.accumulation.updates.torch_optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with the live learning rates."""
        groups: list[dict[str, Any]] = (
            [] if self.accumulation is None else self.accumulation.updates.optimizer.param_groups
        )
        return groups
