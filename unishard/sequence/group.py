"""The ranks that share a sample: neighbors, each with a part of its positions."""

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


def make_group(size: int) -> SequenceGroup:
    """The group of this rank; `size` divides the ranks. Collective."""
    groups = [range(first, first + size) for first in range(0, dist.get_world_size(), size)]
    return SequenceGroup(own_group(groups), own_group(groups, "gloo"), size, dist.get_rank() % size)
