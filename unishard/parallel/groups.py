"""The groups of ranks that have a model together."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from unishard.distributed.process_group import own_group
from unishard.distributed.slices import Slice


@dataclass(frozen=True)
class Groups:
    """Those of this rank, whose collectives are those of its peers."""

    size: int
    number: int
    """Of this rank among its peers."""
    peers: dist.ProcessGroup | None
    """Neighboring ranks that have everything together; None in a plan, which sends nothing."""
    holders: dist.ProcessGroup | None
    """The ranks with the same number, of those that share one copy."""
    copy: dist.ProcessGroup | None = None
    """The ranks that share one copy; None for all."""

    def part(self, dim: int = 0, packed: int = 1) -> Slice:
        """Which part of a parameter this rank has, that is cut along a dimension."""
        return Slice(self.number, self.size, self.holders, self.peers, dim, packed, self.copy)

    def all_reduce(self, values: Tensor) -> None:
        """Add those of all peers to these. Collective."""
        dist.all_reduce(values, group=self.peers)

    def all_gather(self, everyones: Tensor, values: Tensor) -> None:
        """Fill in those of all peers, behind each other. Collective."""
        dist.all_gather_into_tensor(everyones, values, group=self.peers)

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive: list[int] | None = None, send: list[int] | None = None
    ) -> None:
        """Send so many rows to each peer, and get theirs; as many to each where none are given. Collective."""
        dist.all_to_all_single(received, sent, receive, send, group=self.peers)


def make_groups(size: int, shared: int | None = None) -> Groups:
    """The groups of this rank. Collective.

    Args:
        size: Of peers; it divides the ranks.
        shared: Ranks in a row that share one copy, if not all; a multiple of the size.
    """
    world = dist.get_world_size()
    copies = [range(first, first + (shared or world)) for first in range(0, world, shared or world)]
    peers = own_group(range(first, first + size) for first in range(0, world, size))
    holders = own_group(ranks[number::size] for ranks in copies for number in range(size))
    copy = own_group(copies) if len(copies) > 1 else None
    return Groups(size, dist.get_rank() % size, peers, holders, copy)
