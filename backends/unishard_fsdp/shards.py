"""This rank's shard of a parameter or gradient under torch's forms of data parallelism."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_

from unishard.distributed.shards import Shard
from unishard.engine.optim.grad_norm import multiply, norm_of

# -- Parameters without dimensions, such as CLIP's `logit_scale`, which `fully_shard` refuses (torch 2.13) --
# They get one dimension before they are sharded. What the model computes with, and what checkpoints hold, has none.

_NUMBER = "_unishard_number"
"""An attribute of the parameter, which its shards get as well."""


def add_dimension(model: nn.Module) -> None:
    """Give each parameter without dimensions the shape (1,), in place; its modules still show it without dimensions."""
    numbers = [parameter for parameter in model.parameters() if not parameter.dim()]
    for module in model.modules() if numbers else ():
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        if names := tuple(name for name, parameter in own if not parameter.dim()):
            kind: Any = type(module)
            module.__class__ = _showing(kind, names)
    for parameter in numbers:
        setattr(parameter, _NUMBER, True)
        parameter.data = parameter.data.view(1)


def shape_of(parameter: Tensor) -> torch.Size:
    """The shape that a parameter has in the user's model."""
    return torch.Size() if hasattr(parameter, _NUMBER) else parameter.shape


def parameter_named(module: nn.Module, name: str) -> Any:
    """`module.get_parameter(name)`, also for a parameter that its module shows without dimensions."""
    path, _, own = name.rpartition(".")
    return nn.Module.__getattr__(module.get_submodule(path), own)


@cache
def _showing(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of the same name whose properties show these parameters without dimensions, as torch's
    parametrizations show theirs.
    """
    shown: dict[str, Any] = {name: property(_without_dimension(name)) for name in names}
    return type(
        kind.__name__,
        (kind,),
        {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__, **shown},
    )


def _without_dimension(name: str) -> Any:
    def show(module: nn.Module) -> Tensor:
        parameter: Any = nn.Module.__getattr__(module, name)  # finds the parameter, where `getattr` finds the property
        return parameter if isinstance(parameter, DTensor) else parameter.view(())

    return show


# -- Norm, division and clipping of sharded or replicated gradients --------------------------------


def local(tensor: Tensor) -> Tensor:
    """This rank's local tensor. Call it under `no_grad`, to avoid an autograd node."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def total_norm(gradients: list[Tensor], device: torch.device, *, copies: int) -> Tensor:
    """Global L2 norm, an fp32 scalar on `device`, equal on all ranks. Collective unless every rank holds all gradients.

    Uses local shards: one collective of one number instead of DTensor's dispatch per gradient. It reduces over all
    ranks even if groups each hold a copy, so that the norm is bit-equal and all ranks clip and skip alike.

    Args:
        gradients: This rank's shards.
        device: Where this rank computes.
        copies: Number of copies of each gradient over all ranks.
    """
    norm = norm_of(gradients).to(device) if gradients else torch.zeros((), device=device)
    if copies == dist.get_world_size():
        return norm
    square = norm.double().square()
    dist.all_reduce(square)
    return (square / copies).sqrt().float()


class _Graded(NamedTuple):
    """All that `clip_grads_with_norm_` asks of a parameter (torch 2.11 to 2.15)."""

    grad: Tensor


def scale(gradients: list[Tensor], norm: Tensor, max_norm: float | None, divisor: float) -> None:
    """Divide gradients and clip them to `max_norm` in place, as `torch.nn.utils.clip_grad_norm_` does (torch 2.13).

    Args:
        gradients: The gradients before division.
        norm: Their norm after division.
        max_norm: None for no clipping.
        divisor: The divisor, mostly 1.
    """
    if not gradients or (max_norm is None and divisor == 1):
        return
    if max_norm is not None and divisor == 1 and gradients[0].device.type != "cpu":  # one kernel for many tensors
        clip_grads_with_norm_(cast(Any, [_Graded(gradient) for gradient in gradients]), max_norm, norm)
        return
    factor = torch.ones_like(norm) if max_norm is None else torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    multiply(gradients, (factor / divisor).to(gradients[0].device))


def shard_of(parameter: nn.Parameter, values: Tensor | None = None) -> Shard:
    """This rank's shard of a parameter, or of `values`, a tensor that is sharded like it. Call it under `no_grad`.

    `fully_shard` splits dim 0 like `torch.chunk`; on a mesh of two axes each group holds a full tensor.
    """
    tensor, shape = parameter if values is None else values, shape_of(parameter)
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            mesh = tensor.device_mesh
            if placement.is_shard(0) and mesh.size(axis) > 1:
                rows = -(-len(tensor) // mesh.size(axis)) * mesh.get_local_rank(axis)
                start = min(rows, len(tensor)) * tensor.shape[1:].numel()
                return Shard(shape, tensor.to_local().view(-1), start, mesh.get_group(axis))
    return Shard(shape, local(tensor).detach().view(shape))
