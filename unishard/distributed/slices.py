"""Parameters of which a rank has an equal part of a dimension, a slice: which part, and which ranks have the same one.

A slice is an ordinary, smaller parameter with a mark. The engine shards it over the ranks that have the same one, its
holders. Where full tensors are built from shards, a shard of a slice is a shard of the full tensor in slice order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.distributed.shards import Shard
from unishard.distributed.slice_order import MEMORY_ORDER, SliceOrder

_MARK = "_unishard_slice"


class Slice(NamedTuple):
    """Which part of a full tensor a parameter is."""

    number: int
    """From 0."""
    of: int
    """Equal parts of the dimension."""
    holders: dist.ProcessGroup | None
    """The ranks with the same part, of those that share one copy; None in a plan, which sends nothing."""
    peers: dist.ProcessGroup | None
    """The ranks that have the full tensor together, each another part."""
    dim: int = 0
    packed: int = 1
    """Tensors that lie one behind the other along the dimension, of each of which it has a part: 2 of gate and up in
    one weight."""
    copy: dist.ProcessGroup | None = None
    """The ranks that share one copy of the model; None for all."""

    def cut(self, full: Tensor) -> Tensor:
        """The part of a full tensor: a view where it lies together."""
        width = full.shape[self.dim] // (self.of * self.packed)
        parts = full.reshape(*full.shape[: self.dim], self.packed, self.of, width, *full.shape[self.dim + 1 :])
        return parts.select(self.dim + 1, self.number).flatten(self.dim, self.dim + 1)

    @property
    def order(self) -> SliceOrder:
        """In which it is an interval of the full tensor."""
        return SliceOrder(self.dim, self.of, self.packed) if self.dim or self.packed > 1 else MEMORY_ORDER

    def full_shape(self, shape: torch.Size) -> torch.Size:
        """Of the full tensor, from that of a part."""
        return torch.Size(size * self.of if dim == self.dim else size for dim, size in enumerate(shape))


def mark(parameter: nn.Parameter, part: Slice | None) -> None:
    """Say that a parameter is a slice; None for a full parameter. Sharding keeps attributes of parameters."""
    if part is None:
        vars(parameter).pop(_MARK, None)
    else:
        setattr(parameter, _MARK, part)


def slice_of(parameter: Tensor) -> Slice | None:
    """The mark of a parameter."""
    part: Slice | None = getattr(parameter, _MARK, None)
    return part


def holders_of(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks that have the same slice; None for a full parameter."""
    part = slice_of(parameter)
    return None if part is None else part.holders


def own_part(parameter: Tensor, full: Tensor) -> Tensor:
    """What a rank computes with of a full tensor: a view."""
    part = slice_of(parameter)
    return full if part is None else part.cut(full)


def of_full(parameter: Tensor, shard: Shard) -> Shard:
    """A shard of a parameter as one of the full tensor; of a full parameter, the shard itself."""
    part = slice_of(parameter)
    if part is None:
        return shard
    start = part.number * shard.shape.numel() + shard.interval.start
    group = part.peers if shard.group is None else part.copy or dist.group.WORLD
    return Shard(part.full_shape(shard.shape), shard.values.reshape(-1), start, group, part.order)


def full_shape(parameter: Tensor) -> torch.Size:
    """Of the full tensor."""
    part = slice_of(parameter)
    return parameter.shape if part is None else part.full_shape(parameter.shape)
