"""This rank's shard of a parameter or gradient under torch's forms of data parallelism."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unishard.distributed.layout import rows
from unishard.distributed.shards import Shard
from unishard.distributed.slices import of_full
from unishard_fsdp.units.dimensionless import shape_of


def local(tensor: Tensor) -> Tensor:
    """This rank's local tensor. Call it under `no_grad`, to avoid an autograd node."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_of(parameter: nn.Parameter, values: Tensor | None = None) -> Shard:
    """This rank's shard of a parameter, or of `values`, a tensor that is sharded like it. Call it under `no_grad`.

    `fully_shard` splits dim 0 like `torch.chunk`; on a mesh of two axes each group holds a full tensor. A shard of a
    slice is one of the full tensor.
    """
    return of_full(parameter, _shard_of(parameter, values))


def _shard_of(parameter: nn.Parameter, values: Tensor | None) -> Shard:
    tensor, shape = parameter if values is None else values, shape_of(parameter)
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            mesh = tensor.device_mesh
            if placement.is_shard(0) and mesh.size(axis) > 1:
                own = rows(tensor.shape, mesh.size(axis)).of(mesh.get_local_rank(axis))
                return Shard(shape, tensor.to_local().view(-1), own.start, mesh.get_group(axis))
    return Shard(shape, local(tensor).detach().view(shape))
