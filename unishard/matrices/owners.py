"""Which rank owns which matrix: the same on all ranks, computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from unishard.distributed.layout import Layout
from unishard.distributed.shards import Shard
from unishard.distributed.slice_order import MEMORY_ORDER, SliceOrder

_ELEMENTS = 2**24
"""Elements of a bucket for each rank: what a rank sends and receives at once, and holds twice while it does."""


class Matrix(NamedTuple):
    """A parameter of two dimensions, or of three: a matrix for each index of the first; for whole tensors, of any."""

    name: str
    """Its name in the model."""
    shape: torch.Size
    dtype: torch.dtype
    """Of the weights that are stepped."""
    group: dist.ProcessGroup | None = None
    """The ranks that each hold an interval; None if this rank holds all of it."""
    intervals: Sequence[range] = ()
    """The elements that each rank of the group holds."""
    held: int = 0
    """Elements that this rank holds."""
    owner: int = 0
    """The rank of the group that computes its updates."""
    bucket: int = -1
    """Matrices of one bucket are exchanged together; -1 for those that are not exchanged."""
    order: SliceOrder = MEMORY_ORDER
    """How the elements of `intervals` are counted."""


def work(shape: Sequence[int]) -> int:
    """Multiplications of a product of a matrix with itself."""
    return prod(shape) * min(shape[-2:])


def owned(
    sections: Iterable[Mapping[str, Shard]],
    layout: Mapping[str, Layout],
    cost: Callable[[Sequence[int]], int] = work,
) -> list[list[Matrix]]:
    """Give each matrix an owner, so that the owners of a bucket have equal work.

    Args:
        sections: This rank's shards of matrices, by name, the same names in the same order on all ranks of a group. No
            bucket mixes two sections.
        layout: Which elements of each the ranks hold.
        cost: The work of a matrix of a shape.
    """
    found, buckets = [], count()
    for section in sections:
        by_group: dict[dist.ProcessGroup | None, list[Matrix]] = {}
        for name, shard in section.items():
            cut = layout[name]
            ranks = cut.ranks * cut.slices
            group = shard.group if ranks > 1 else None
            intervals, held = [*map(cut.of, range(ranks))], shard.values.numel()
            by_group.setdefault(group, []).append(
                Matrix(name, shard.shape, shard.values.dtype, group, intervals, held, order=shard.order)
            )
        members: list[Matrix] = []
        for group, matrices in by_group.items():
            members += matrices if group is None else _with_owners(matrices, buckets, cost)
        found.append(members)
    return found


def _with_owners(
    matrices: Sequence[Matrix], numbers: Iterator[int], cost: Callable[[Sequence[int]], int]
) -> Iterator[Matrix]:
    ranks = len(matrices[0].intervals)
    for members in _buckets(matrices, ranks * _ELEMENTS):
        bucket, owners = next(numbers), _balanced([cost(each.shape) for each in members], ranks)
        yield from (each._replace(owner=owner, bucket=bucket) for each, owner in zip(members, owners, strict=True))


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
