"""Tensors of which each rank holds a part: the whole, its norm, and an edit put back into its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Shard", "full_tensor", "shard_norms", "write_shard"]


class Shard(NamedTuple):
    """What this rank holds of a tensor."""

    shape: torch.Size
    """Shape of the whole."""
    values: Tensor
    """The engine's own memory, any floating dtype: the whole in its shape, or a flat stretch of it, perhaps without elements."""
    start: int = 0
    """Where the stretch starts in the flattened whole."""
    group: dist.ProcessGroup | None = None
    """The ranks whose stretches make the whole, without overlap; None where this rank holds all of it."""


def full_tensor(part: Shard, device: torch.device) -> Tensor:
    """A copy of the whole on a device, fp32. Collective."""
    if part.group is None:
        return torch.empty(part.shape, dtype=torch.float32, device=device).copy_(part.values)
    # A sum with zeros is exact, and parts may be of any size, which an all-gather would have to pad.
    flat = torch.zeros(part.shape.numel(), dtype=torch.float32, device=device)
    flat[part.start : part.start + part.values.numel()].copy_(part.values)
    if dist.get_world_size(part.group) > 1:
        dist.all_reduce(flat, group=part.group)
    return flat.view(part.shape)


def write_shard(part: Shard, value: Tensor) -> None:
    """Put this rank's part of a whole into its place."""
    if part.group is None:
        part.values.copy_(value)
    else:
        part.values.copy_(value.reshape(-1)[part.start : part.start + part.values.numel()])


def shard_norms(parts: Mapping[str, Shard], device: torch.device) -> dict[str, float]:
    """L2 norm of each whole, taken in fp32 and summed in fp64: one all-reduce for each group of ranks. Collective."""
    held = list(parts.values())
    squares = torch.zeros(len(held), dtype=torch.float64, device=device)
    on: dict[torch.device, list[int]] = {}
    across: dict[dist.ProcessGroup, list[int]] = {}
    for index, part in enumerate(held):
        on.setdefault(part.values.device, []).append(index)
        if part.group is not None and dist.get_world_size(part.group) > 1:
            across.setdefault(part.group, []).append(index)
    for indices in on.values():
        found = [torch.linalg.vector_norm(held[index].values, 2, dtype=torch.float32) for index in indices]
        squares[indices] = torch.stack(found).double().square().to(device)
    for group, indices in across.items():
        together = squares[indices]
        dist.all_reduce(together, group=group)
        squares[indices] = together
    return dict(zip(parts, squares.sqrt().tolist(), strict=True))
