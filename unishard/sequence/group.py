"""The ranks that share a sample: neighbors, each with a part of its positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """A group of neighboring ranks that share each sample."""

    process_group: dist.ProcessGroup
    hosts: dist.ProcessGroup
    """The same ranks, over gloo."""
    size: int
    rank: int
    """Of this process, in the group."""


def make_group(size: int) -> SequenceGroup:
    """The group of this rank; `size` divides the ranks. Collective: every rank makes every group, in the same order."""
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = [list(range(first, first + size)) for first in range(0, world, size)]
    made = [(dist.new_group(ranks), dist.new_group(ranks, backend="gloo")) for ranks in groups]
    return SequenceGroup(*made[rank // size], size, rank % size)
