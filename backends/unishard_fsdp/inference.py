"""A model under `fully_shard` that is only evaluated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from unishard.distributed.shards import Shard
from unishard.engine.inference import UntrainedEngine
from unishard.plugins.backend import Placement
from unishard_fsdp.clipping import local
from unishard_fsdp.generation import gathering_in_generate
from unishard_fsdp.shards import shard_of

__all__ = ["FSDPInferenceEngine"]


class FSDPInferenceEngine(UntrainedEngine):
    """Gathers a unit for its forward, drops it afterwards, and has nothing to reduce."""

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with gathering_in_generate(self._module):
            return super()._generate(*args, **kwargs)

    @torch.no_grad()
    def placement(self) -> Placement:
        """What the engine really holds, read off its live tensors."""
        parts = [name for name, part in self._module.named_modules() if isinstance(part, FSDPModule)]
        return Placement(
            engine=FSDPModule.__name__ if "" in parts else type(self._module).__name__,
            units=tuple(name for name in parts if name),
            master_dtypes=frozenset(),
            master_numel=0,
            param_bytes=sum(local(parameter).nbytes for parameter in self._module.parameters()),
        )

    def _master_part(self, parameter: nn.Parameter) -> Shard:
        self._at_rest()
        return shard_of(parameter)

    def _refresh(self, parameter: nn.Parameter, whole: Tensor) -> None:
        self._at_rest()  # what is gathered was made from the old values

    def _settle_state(self) -> None:
        self._at_rest()

    def _at_rest(self) -> None:
        for part in self._module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def _release(self) -> None:
        """FSDP2 belongs to the module and goes with it."""
