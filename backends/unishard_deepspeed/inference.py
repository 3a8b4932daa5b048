"""The adapter of a model at stage 3 that is only evaluated: DeepSpeed's `DeepSpeedZeRoOffload` in place of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.distributed.shards import Shard
from unishard.engine.adapter import InferenceAdapter
from unishard.engine.results import Placement
from unishard_deepspeed.patches import shards
from unishard_deepspeed.patches.building import forget
from unishard_deepspeed.patches.optimizer_kind import require
from unishard_deepspeed.placement import parameter_bytes, units

__all__ = ["DeepSpeedInferenceAdapter"]


class DeepSpeedInferenceAdapter(InferenceAdapter):
    """Gathers a unit for its forward and drops it afterwards."""

    def __init__(self, engine: Any, device: torch.device, hooks: Sequence[RemovableHandle]) -> None:
        super().__init__(engine.module, device)
        self._engine = engine
        self._hooks = hooks
        """On the model; they go with the engine."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Through the module, whose hooks gather."""
        # Not through the engine, which would take a backward through the outputs for one of its own (runtime/engine.py, forward).
        return self.module(*args, **kwargs)

    def placement(self) -> Placement:
        """What the engine really holds, read off its live tensors."""
        return Placement(
            engine=type(self._engine).__name__,
            units=units(self._engine),
            master_dtypes=frozenset(),
            master_numel=0,
            param_bytes=parameter_bytes(self.module.parameters()),
        )

    def master_shard(self, parameter: nn.Parameter) -> Shard:
        """The partitioned parameter."""
        require("masters", "stage-3")
        return shards.master_part(self._engine.optimizer, None, parameter, "stage-3")

    def refresh(self, parameter: nn.Parameter, full: Tensor) -> None:
        """The partitioned parameter, in `precision.compute`."""
        shards.low_precision_copy(parameter, full, "stage-3")

    def close(self) -> None:
        """Destroy the `DeepSpeedEngine`, and take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()
        self._engine.destroy()
        forget(self._engine)
        del self._engine
