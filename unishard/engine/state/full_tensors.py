"""Full tensors from the shards of all ranks, several by one collective.

They share a buffer of bytes. Each rank copies its part of every tensor into it, and the sum over the ranks is the full
tensors: a byte that one rank has and the others leave at zero is exact, whatever its dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.checkpoint.export.plan import ExportedTensor
from unishard.distributed.lazy_shards import LazyShard

_ALIGNMENT = 16
"""Bytes of the largest element that torch has: each tensor is a view of the buffer in its own dtype."""


def full_tensors(
    wanted: Sequence[ExportedTensor],
    shards: Mapping[str, LazyShard],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> list[Tensor]:
    """Read tensors in full, as views of one buffer. Collective.

    Args:
        wanted: The same on all ranks of the group.
        shards: What this rank has of their sources.
        group: The ranks that together have all elements, each once; None if this rank has them all.
        device: Of the tensors.
    """
    sizes = [buffer_bytes(tensor) for tensor in wanted]
    buffer = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    places = torch.split(buffer, sizes)
    for tensor, place in zip(wanted, places, strict=True):
        _fill(place, tensor, shards)
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(buffer, group=group)
    return [
        place[: math.prod(tensor.shape) * tensor.dtype.itemsize].view(tensor.dtype).view(tensor.shape)
        for tensor, place in zip(wanted, places, strict=True)
    ]


def buffer_bytes(tensor: ExportedTensor) -> int:
    """Bytes that a tensor takes in the buffer."""
    return -(-math.prod(tensor.shape) * tensor.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _fill(place: Tensor, tensor: ExportedTensor, shards: Mapping[str, LazyShard]) -> None:
    """Copy what this rank has of a tensor to its place."""
    size, at = tensor.dtype.itemsize, 0
    for part in tensor.parts or (tensor,):
        shard, count = shards[part.source], math.prod(part.shape)
        own = place[at : at + count * size].view(tensor.dtype)
        for held in shard.within(part.start, part.start + count):
            held.view_in(own, part.start).copy_(held.read(shard))
        at += count * size
