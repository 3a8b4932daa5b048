"""Inference without sharding: a full copy of the model on each rank, in `precision.compute`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import nn

from unishard.config import Precision
from unishard.contract.adapter import ShardedModel
from unishard.contract.kit.dtypes import cast_to_compute
from unishard.contract.kit.input_casts import cast_inputs
from unishard.contract.kit.materialization import materialize
from unishard.contract.results import Placement
from unishard.distributed.broadcast import broadcast
from unishard.distributed.shards import Shard
from unishard.distributed.slices import of_full


@final
class ReplicaAdapter(ShardedModel):
    """A full model on each rank, for strategies that shard only gradients and optimizer state."""

    forward_is_collective = False

    def __init__(
        self, model: nn.Module, precision: Precision, device: torch.device, casting: Sequence[nn.Module]
    ) -> None:
        """Broadcast rank 0's model to every rank. Collective.

        Args:
            model: Full on rank 0.
            precision: Its `compute` is the dtype of the copy.
            device: Where this rank computes.
            casting: The modules that, like the root, cast floating-point inputs to a 16-bit compute dtype: the units of
                training.
        """
        super().__init__(model, device)
        for parameter in model.parameters():  # one at a time, so that only one parameter exists in two dtypes
            broadcast(materialize([parameter], device))
            cast_to_compute([parameter], precision)
        buffers = list(model.buffers())
        broadcast(materialize(buffers, device))
        self._hooks = cast_inputs([model, *casting], precision)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model itself."""
        return self.module(*args, **kwargs)

    def master_shard(self, parameter: nn.Parameter) -> Shard:
        """The parameter itself."""
        return of_full(parameter, Shard(parameter.shape, parameter.detach()))

    def placement(self) -> Placement:
        """What this rank holds."""
        return Placement(
            engine=type(self.module).__name__,
            units=(),
            master_dtypes=frozenset(),
            master_numel=0,
            param_bytes=sum(parameter.nbytes for parameter in self.module.parameters()),
        )

    def close(self) -> None:
        """Remove the input casts from the model."""
        for hook in self._hooks:
            hook.remove()
