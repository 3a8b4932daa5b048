"""Shards slices over the ranks that hold them, beside parameters that all ranks hold."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from unishard.distributed.slices import holders_of
from unishard_fsdp.private import PRIVATE_API


def placement_of_slices(model: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
    """The arguments of `fully_shard` that place slices; none for a model without any. Collective.

    A unit may have parameters of several groups of ranks, each of which FSDP2 gathers and reduces in a collective of
    its own (torch 2.12 and later, _fsdp_common.py, ShardPlacementResult).

    Args:
        model: Not sharded yet.
        mesh: Of full parameters.

    Raises:
        BackendError: This torch cannot do it.
    """
    groups = dict.fromkeys(filter(None, map(holders_of, model.parameters())))
    if not groups:
        return {}
    PRIVATE_API["slices"].require()
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

    placed = {group: ShardPlacementResult(Shard(0), _info(group, mesh)) for group in groups}

    def place(parameter: nn.Parameter) -> Any:
        group = holders_of(parameter)
        return None if group is None else placed[group]

    return {"shard_placement_fn": place}


def _info(holders: dist.ProcessGroup, mesh: DeviceMesh) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

    kind = mesh.device_type
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh=DeviceMesh.from_group(holders, kind, mesh_dim_names=("shard",)), shard_mesh_dim=0)
    replicas, shards = (mesh.get_group(name) for name in ("replicate", "shard"))
    groups = [holders, shards] if dist.get_world_size(shards) == 1 else [replicas, holders]
    starts, others = map(dist.get_process_group_ranks, groups)
    ranks = [[start + other - dist.get_rank() for other in others] for start in starts]
    own = DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=("replicate", "shard"))
    return HSDPMeshInfo(mesh=own, shard_mesh_dim=1, replicate_mesh_dim=0)
