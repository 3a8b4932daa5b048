"""The tensors through which FSDP2 reads this rank's shards of parameters: with their padding, for gathers, and as the
parameters have them (torch 2.13, _fsdp_param.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from unishard_fsdp.private.groups import groups_of


def shard_memory(modules: Iterable[Any]) -> list[Tensor]:
    """Those of sharded modules."""
    parameters = [parameter for group in groups_of(modules) for parameter in group.fsdp_params]
    return [tensor for each in parameters for tensor in (each._sharded_param_data, each.sharded_param._local_tensor)]
