"""What a model under torch's data parallelism holds, from its live tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from unishard.contract.results import Placement
from unishard.distributed.dtypes import name_of
from unishard_fsdp.shards import local


@torch.no_grad()
def placement_of(
    module: nn.Module, engine: str, *, units: Sequence[str] = (), masters: Sequence[nn.Parameter] = ()
) -> Placement:
    """Report what this rank holds.

    Args:
        module: The model.
        engine: Name of the class that runs it.
        units: Names of its units.
        masters: The trainable parameters that this rank updates.
    """
    own = [local(parameter) for parameter in masters]
    return Placement(
        engine=engine,
        units=tuple(units),
        master_dtypes=frozenset(name_of(master.dtype) for master in own),
        master_numel=sum(master.numel() for master in own),
        param_bytes=sum(local(parameter).nbytes for parameter in module.parameters()),
    )
