"""Parameters of which a rank has an equal part of dimension 0, a slice: which part, and which ranks have the same one.

A slice is an ordinary, smaller parameter with a mark. The engine shards it over the ranks that have the same one, its
holders. Where full tensors are built from shards, a shard of a slice is a shard of the full tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.distributed.shards import Shard

_MARK = "_unishard_slice"


class Slice(NamedTuple):
    """Which part of a full tensor a parameter is."""

    number: int
    """From 0."""
    of: int
    """Equal parts of dimension 0."""
    holders: dist.ProcessGroup | None
    """The ranks with the same part; None in a plan, which sends nothing."""
    peers: dist.ProcessGroup | None
    """The ranks that have the full tensor together, each another part."""

    def cut(self, full: Tensor) -> Tensor:
        """The part of a full tensor, a view."""
        rows = full.shape[0] // self.of
        return full.narrow(0, self.number * rows, rows)


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
    rows, *rest = shard.shape
    start = part.number * shard.shape.numel() + shard.interval.start
    group = part.peers if shard.group is None else dist.group.WORLD
    return Shard(torch.Size((rows * part.of, *rest)), shard.values.reshape(-1), start, group)
