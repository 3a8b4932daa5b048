"""A model at stage 3 that is only evaluated: DeepSpeed's `DeepSpeedZeRoOffload` in place of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.config import Config
from unishard.distributed.shards import Shard
from unishard.engine.inference import UntrainedEngine
from unishard.plugins.backend import Placement
from unishard_deepspeed.patches import shards
from unishard_deepspeed.patches.building import forget
from unishard_deepspeed.patches.optimizer_kind import require
from unishard_deepspeed.placement import parameter_bytes, units

__all__ = ["DeepSpeedInferenceEngine"]


class DeepSpeedInferenceEngine(UntrainedEngine):
    """Gathers a unit for its forward and drops it afterwards."""

    def __init__(self, cfg: Config, engine: Any, device: torch.device, hooks: Sequence[RemovableHandle]) -> None:
        super().__init__(cfg, engine.module, device)
        self._engine = engine
        self._hooks = hooks
        """On the model; they go with the engine."""

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        # Not through the engine, which would take a backward through the outputs for one of its own (runtime/engine.py, forward).
        return self._module(*args, **kwargs)

    def placement(self) -> Placement:
        """What the engine really holds, read off its live tensors."""
        return Placement(
            engine=type(self._engine).__name__,
            units=units(self._engine),
            master_dtypes=frozenset(),
            master_numel=0,
            param_bytes=parameter_bytes(self._module.parameters()),
        )

    def _master_part(self, parameter: nn.Parameter) -> Shard:
        require("masters", "stage-3")
        return shards.master_part(self._engine.optimizer, None, parameter, "stage-3")

    def _refresh(self, parameter: nn.Parameter, whole: Tensor) -> None:
        shards.low_precision_copy(parameter, whole, "stage-3")

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._engine.destroy()
        forget(self._engine)
        del self._engine
