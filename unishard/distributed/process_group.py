"""The process group of a run in use: its timeout, and other groups of its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DEFAULT = timedelta(minutes=30)
"""Timeout of collectives, over gloo and NCCL, where nobody has chosen one."""

_timeout = DEFAULT
_host_groups: dict[Any, dist.ProcessGroup] = {}
_own_groups: dict[Any, dist.ProcessGroup] = {}
_meshes: dict[Any, DeviceMesh] = {}
"""Both by the default group and what was asked for: a group is never destroyed, and has threads of its own."""
_spare_groups: dict[Any, list[dist.ProcessGroup]] = {}
"""For each default group, the groups that were given back."""


def timeout() -> timedelta:
    """How long collectives wait for a late rank; when it expires, torch ends the process with its own report."""
    return _timeout


def set_timeout(timeout: timedelta) -> None:
    """Set that for the groups that are made from now on."""
    global _timeout
    _timeout = timeout


def mesh_of_ranks(device: str, shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """A mesh of all ranks whose groups have that timeout, where torch gives new ones its own: 10 minutes on NCCL.
    Collective at the first call.
    """
    key = (dist.group.WORLD, device, *shape, *names)
    if key not in _meshes:
        _meshes[key] = init_device_mesh(device, tuple(shape), mesh_dim_names=tuple(names))
    for group in _meshes[key].get_all_groups():
        group.set_timeout(_timeout)
    return _meshes[key]


def own_group(groups: Iterable[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup:
    """The one of several groups that this rank is in. Collective at the first call: every rank makes every group.

    Args:
        groups: Ranks in order; the same on every rank.
        backend: As in torch; by default that of the process group.
    """
    every = tuple(map(tuple, groups))
    key = (dist.group.WORLD, backend, every)
    if key not in _own_groups:
        made = [dist.new_group(list(ranks), backend=backend, timeout=_timeout) for ranks in every]
        _own_groups[key] = next(group for group, ranks in zip(made, every, strict=True) if dist.get_rank() in ranks)
    return _own_groups[key]


def host_group() -> dist.ProcessGroup:
    """A gloo group of all ranks, for the main thread and the check of its calls. Collective at the first call."""
    world = dist.group.WORLD
    if world not in _host_groups:
        _host_groups.clear()
        _host_groups[world] = dist.new_group(backend="gloo", timeout=_timeout)
    return _host_groups[world]


def borrow_group() -> dist.ProcessGroup:
    """A gloo group of all ranks for one background thread: threads must not share a group, or their messages mix.

    Collective.

    All ranks must borrow and give back in the same order.
    """
    world = dist.group.WORLD
    spare = _spare_groups.get(world)
    return spare.pop() if spare else dist.new_group(backend="gloo", timeout=_timeout)


def give_back(group: dist.ProcessGroup, world: Any) -> None:
    """Return a borrowed group for reuse.

    It is not destroyed, since a slower rank may still be reading its last message.

    Args:
        group: From `borrow_group`; no longer in use.
        world: The default group at that time.
    """
    if dist.is_initialized() and world is dist.group.WORLD:
        _spare_groups.setdefault(world, []).append(group)


def forget_groups() -> None:
    """Drop the groups of a process group that is destroyed."""
    for kept in (_host_groups, _own_groups, _meshes, _spare_groups):
        kept.clear()
