"""Sharded tensors: gather the full tensor, take its norm, and write an edited tensor back to the shards."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from unishard.distributed.slice_order import MEMORY_ORDER, SliceOrder


class Shard(NamedTuple):
    """This rank's shard of a tensor."""

    shape: torch.Size
    """Shape of the full tensor."""
    values: Tensor
    """The engine's own memory, any floating dtype: the full tensor in its shape, or a flat interval of it, possibly
    empty."""
    start: int = 0
    """Start of the interval."""
    group: dist.ProcessGroup | None = None
    """The ranks whose shards make the full tensor, without overlap; None if this rank holds all of it."""
    order: SliceOrder = MEMORY_ORDER
    """How the elements are counted."""

    @property
    def interval(self) -> range:
        """The elements of the full tensor that this rank holds, in their order."""
        begin = 0 if self.group is None else self.start
        return range(begin, begin + self.values.numel())


class SteppedShard(NamedTuple):
    """Where an optimizer finds this rank's shard of a parameter while it steps."""

    tensor: Tensor
    """What the optimizer's groups hold: the shard, or a flat tensor of many shards. Any tensor, if this rank has no
    element of the parameter."""
    start: int = 0
    """First element of the shard in it."""


def flat(values: Tensor) -> Tensor:
    """The elements in a row, contiguous, of a tensor of any layout: transposed, strided, expanded, conjugate or negated
    on demand.

    Shares memory with the tensor if it is contiguous.
    """
    row = values.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    # `contiguous` keeps the stride of a single element, with which torch does not view it as bytes (torch 2.13).
    return row if row.stride() == (1,) else row.clone(memory_format=torch.contiguous_format)


def norm_of(values: Tensor) -> Tensor:
    """L2 norm of a floating-point or complex tensor, taken in fp64 if it is fp64, else in fp32."""
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.dtype.itemsize == 1:  # float8, which torch promotes to no other dtype (torch 2.13)
        values = values.float()
    norm: Tensor = torch.linalg.vector_norm(
        values, 2, dtype=torch.float64 if values.dtype == torch.float64 else torch.float32
    )
    return norm


def copy_dtype(values: Tensor) -> torch.dtype:
    """The dtype of full copies: fp32, or complex64 of complex tensors, which may be frozen parameters."""
    return torch.complex64 if values.is_complex() else torch.float32


def full_tensor(shard: Shard, device: torch.device) -> Tensor:
    """A full copy on a device in `copy_dtype`. Collective."""
    dtype = copy_dtype(shard.values)
    if shard.group is None:
        return torch.empty(shard.shape, dtype=dtype, device=device).copy_(shard.values)
    # A sum with zeros is exact, and shards may have any size, which an all-gather would have to pad.
    flat = torch.zeros(shard.shape.numel(), dtype=dtype, device=device)
    flat[shard.start : shard.start + shard.values.numel()].copy_(shard.values)
    if dist.get_world_size(shard.group) > 1:
        dist.all_reduce(flat, group=shard.group)
    return shard.order.full(flat, shard.shape)


def write_shard(shard: Shard, value: Tensor) -> None:
    """Copy this rank's shard out of a full tensor into the engine's memory."""
    if shard.group is None:
        shard.values.copy_(value)
    else:
        shard.values.copy_(shard.order.counted(value)[shard.start : shard.start + shard.values.numel()])


def shard_norms(shards: Mapping[str, Shard], device: torch.device) -> dict[str, float]:
    """L2 norm of each full tensor, taken in fp32 (fp64 of fp64) and summed in fp64: one all-reduce per process group.

    Collective.
    """
    values = [shard.values for shard in shards.values()]
    squares = torch.zeros(len(shards), dtype=torch.float64, device=device)
    on: dict[torch.device, list[int]] = {}
    across: dict[dist.ProcessGroup, list[int]] = {}
    for index, shard in enumerate(shards.values()):
        on.setdefault(shard.values.device, []).append(index)
        if shard.group is not None and dist.get_world_size(shard.group) > 1:
            across.setdefault(shard.group, []).append(index)
    for indices in on.values():
        squares[indices] = torch.stack([norm_of(values[index]) for index in indices]).double().square().to(device)
    for group, indices in across.items():
        group_squares = squares[indices]
        dist.all_reduce(group_squares, group=group)
        squares[indices] = group_squares
    return dict(zip(shards, squares.sqrt().tolist(), strict=True))


def norm_across(shards: Collection[Shard], device: torch.device) -> Tensor:
    """L2 norm of all full tensors together, a 0-d fp32 tensor: one kernel for all norms where the shards allow it.

    Collective.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    if any(shard.values.dtype != torch.float32 or shard.values.device != device for shard in shards):
        norms = shard_norms({str(index): shard for index, shard in enumerate(shards)}, device)
        total += sum(norm**2 for norm in norms.values())
        return total.sqrt().float()
    by_group: dict[dist.ProcessGroup | None, list[Tensor]] = {}
    for shard in shards:
        by_group.setdefault(shard.group, []).append(shard.values)
    for group, values in by_group.items():
        square = get_total_norm(values).double().square()
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(square, group=group)
        total += square
    return total.sqrt().float()
