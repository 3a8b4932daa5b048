"""Which interval of which matrix each rank holds, and which rank owns it: the same on all ranks, computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from unishard.distributed.shards import Shard

_ELEMENTS = 2**24
"""Elements of a bucket for each rank: what a rank sends and receives at once, and holds twice while it does."""


class Interval(NamedTuple):
    """Elements of a flattened matrix that a rank holds."""

    start: int
    numel: int


class Matrix(NamedTuple):
    """A parameter of two dimensions, or of three: a matrix for each index of the first; for whole tensors, of any."""

    name: str
    """Its name in the model."""
    shape: torch.Size
    dtype: torch.dtype
    """Of the weights that are stepped."""
    group: dist.ProcessGroup | None = None
    """The ranks that each hold an interval; None if this rank holds all of it."""
    intervals: tuple[Interval, ...] = ()
    """By rank of the group."""
    held: int = 0
    """Elements that this rank holds."""
    owner: int = 0
    """The rank of the group that computes its updates."""
    bucket: int = -1
    """Matrices of one bucket are exchanged together; -1 for those that are not exchanged."""


def work(shape: Sequence[int]) -> int:
    """Multiplications of a product of a matrix with itself."""
    return prod(shape) * min(shape[-2:])


def layout_of(
    sections: Iterable[Mapping[str, Shard]], device: torch.device, cost: Callable[[Sequence[int]], int] = work
) -> list[list[Matrix]]:
    """Lay out matrices, with one owner each, so that the owners of a bucket have equal work. Collective.

    Args:
        sections: This rank's shards of matrices, by name, the same names in the same order on all ranks of a group. No
            bucket mixes two sections.
        device: Where this rank communicates.
        cost: The work of a matrix of a shape.
    """
    layout, buckets = [], 0
    for section in sections:
        by_group: dict[dist.ProcessGroup | None, dict[str, Shard]] = {}
        for name, shard in section.items():
            by_group.setdefault(_group_of(shard), {})[name] = shard
        members: list[Matrix] = []
        for group, shards in by_group.items():
            if group is None:
                members += [
                    Matrix(name, shard.shape, shard.values.dtype, held=shard.values.numel())
                    for name, shard in shards.items()
                ]
            else:
                members += _shared(group, shards, device, buckets, cost)
                buckets = 1 + members[-1].bucket
        layout.append(members)
    return layout


def _group_of(shard: Shard) -> dist.ProcessGroup | None:
    return None if shard.group is None or dist.get_world_size(shard.group) == 1 else shard.group


def _shared(
    group: dist.ProcessGroup,
    shards: Mapping[str, Shard],
    device: torch.device,
    bucket: int,
    cost: Callable[[Sequence[int]], int],
) -> Iterator[Matrix]:
    """Yield matrices that the ranks of a group share. Collective."""
    ranks = dist.get_world_size(group)
    own = torch.tensor([[shard.start, shard.values.numel()] for shard in shards.values()], device=device)
    everyone = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(everyone, own, group=group)
    intervals = torch.stack(everyone, dim=1).tolist()
    found = [
        Matrix(
            name,
            shard.shape,
            shard.values.dtype,
            group,
            tuple(Interval(*each) for each in of_ranks),
            shard.values.numel(),
        )
        for (name, shard), of_ranks in zip(shards.items(), intervals, strict=True)
    ]
    for number, members in enumerate(_buckets(found, ranks * _ELEMENTS)):
        owners = _balanced([cost(each.shape) for each in members], ranks)
        yield from (
            each._replace(owner=owner, bucket=bucket + number) for each, owner in zip(members, owners, strict=True)
        )


def _buckets(matrices: Iterable[Matrix], limit: int) -> Iterator[list[Matrix]]:
    """Cut a list where the elements would exceed a limit; a larger matrix is a bucket of its own."""
    members: list[Matrix] = []
    for matrix in matrices:
        if members and sum(each.shape.numel() for each in members) + matrix.shape.numel() > limit:
            yield members
            members = []
        members.append(matrix)
    if members:
        yield members


def _balanced(costs: Sequence[int], ranks: int) -> list[int]:
    """An owner for each cost: the largest first, each to the rank that has the least."""
    loads, owners = [0] * ranks, [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda each: -costs[each]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += costs[place]
    return owners
