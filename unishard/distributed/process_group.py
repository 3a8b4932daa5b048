"""The process group of a run in use: its timeout, and groups of the hosts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

TIMEOUT = timedelta(minutes=30)
"""Timeout of collectives, over gloo and NCCL; when it expires, torch ends the process with its own report."""

_host_groups: dict[Any, dist.ProcessGroup] = {}
_spare_groups: dict[Any, list[dist.ProcessGroup]] = {}
"""For each default group, the groups that were given back."""


def host_group() -> dist.ProcessGroup:
    """A gloo group of all ranks, for the main thread and the check of its calls. Collective at the first call."""
    world = dist.group.WORLD
    if world not in _host_groups:
        _host_groups.clear()
        _host_groups[world] = dist.new_group(backend="gloo", timeout=TIMEOUT)
    return _host_groups[world]


def borrow_group() -> dist.ProcessGroup:
    """A gloo group of all ranks for one background thread: threads must not share a group, or their messages mix.

    Collective.

    All ranks must borrow and give back in the same order.
    """
    world = dist.group.WORLD
    spare = _spare_groups.get(world)
    return spare.pop() if spare else dist.new_group(backend="gloo")


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
    _host_groups.clear()
    _spare_groups.clear()
