"""The ranks that share a sample, each with a part of its positions: neighbors, or `parallel.tensor.size` apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from unishard.distributed.process_group import own_group


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """A group of neighboring ranks that share each sample."""

    process_group: dist.ProcessGroup | None
    """None in a plan, whose tensors have no data to send."""
    hosts: dist.ProcessGroup | None
    """The same ranks, over gloo."""
    size: int
    rank: int
    """Of this process, in the group."""

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """Send the n-th of a stack of tensors to the n-th rank. Collective in the group."""
        if self.process_group is not None:
            dist.all_to_all_single(received, sent, group=self.process_group)

    def all_gather(self, everyones: Sequence[Tensor], tensor: Tensor) -> None:
        """Fill in the tensors of all ranks. Collective in the group."""
        if self.process_group is not None:
            dist.all_gather([*everyones], tensor, group=self.process_group)


def make_group(size: int, apart: int = 1) -> SequenceGroup:
    """The group of this rank. Collective.

    Args:
        size: Ranks of a group; with `apart`, it divides the ranks.
        apart: How far these are from each other: ranks in between have other parts of the layers.
    """
    world, block = dist.get_world_size(), size * apart
    groups = [
        range(first + number, first + block, apart) for first in range(0, world, block) for number in range(apart)
    ]
    return SequenceGroup(own_group(groups), own_group(groups, "gloo"), size, dist.get_rank() // apart % size)
