"""The groups of ranks that have a model together."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist

from unishard.distributed.process_group import own_group


class Groups(NamedTuple):
    """Those of this rank."""

    size: int
    number: int
    """Of this rank among its peers."""
    peers: dist.ProcessGroup | None
    """Neighboring ranks that have everything together; None in a plan, which sends nothing."""
    holders: dist.ProcessGroup | None
    """The ranks with the same number."""


def make_groups(size: int) -> Groups:
    """The groups of this rank; `size` divides the ranks. Collective."""
    world = dist.get_world_size()
    peers = own_group(range(first, first + size) for first in range(0, world, size))
    holders = own_group(range(number, world, size) for number in range(size))
    return Groups(size, dist.get_rank() % size, peers, holders)


def planned_groups(size: int) -> Groups:
    """Those of a plan, which sends nothing."""
    return Groups(size, 0, None, None)
