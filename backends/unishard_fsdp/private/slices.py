"""Shards slices over the ranks that hold them, beside parameters that all ranks hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from unishard.distributed.slices import holders_of
from unishard_fsdp.private import PRIVATE_API


def placement_of_slices(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """The arguments of `fully_shard` that place slices; none for a model without any. Collective.

    A unit may have parameters of several groups of ranks, each of which FSDP2 gathers and reduces in a collective of
    its own (torch 2.12 and later, _fsdp_common.py, ShardPlacementResult).

    Raises:
        BackendError: This torch cannot do it.
    """
    groups = dict.fromkeys(filter(None, map(holders_of, model.parameters())))
    if not groups:
        return {}
    PRIVATE_API["slices"].require()
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    placed = {group: ShardPlacementResult(Shard(0), _info(FSDPMeshInfo, group, device)) for group in groups}

    def place(parameter: nn.Parameter) -> Any:
        group = holders_of(parameter)
        return None if group is None else placed[group]

    return {"shard_placement_fn": place}


def _info(kind: Any, group: dist.ProcessGroup, device: torch.device) -> Any:
    return kind(mesh=DeviceMesh.from_group(group, device.type, mesh_dim_names=("holders",)), shard_mesh_dim=0)
