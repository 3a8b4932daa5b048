"""What a model under torch's data parallelism holds, from its live tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unishard.contract.results import Placement
from unishard.distributed.dtypes import name_of
from unishard_fsdp.sharding.local_shards import local


@torch.no_grad()
def placement_of(
    module: nn.Module, engine: str, *, units: Sequence[str] = (), masters: Sequence[Tensor] = ()
) -> Placement:
    """Report what this rank holds.

    Args:
        module: The model.
        engine: Name of the class that runs it.
        units: Names of its units.
        masters: What this rank updates: trainable parameters, or their master weights.
    """
    own = [local(parameter) for parameter in masters]
    return Placement(
        engine=engine,
        units=tuple(units),
        master_dtypes=frozenset(name_of(master.dtype) for master in own),
        master_numel=sum(master.numel() for master in own),
        param_bytes=sum(local(parameter).nbytes for parameter in module.parameters()),
    )
