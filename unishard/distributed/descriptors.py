"""File descriptors of a large run: each gloo group connects every rank with every other one, three groups in a run of
unishard.
"""

from __future__ import annotations

import contextlib
import os
import resource

LAZY = 256
"""Ranks above which gloo connects two ranks when they first send to each other. Below, a rank that is killed breaks its
connections, which the others notice in a collective at once and not only through their connection to rank 0."""
_GROUPS = 3
"""The default group, the one for the host, and the one of saves in the background."""
_OTHERS = 512
"""Files, devices, libraries, data loaders."""
_VARIABLE = "TORCH_GLOO_LAZY_INIT"


def needed(world_size: int) -> int:
    """Descriptors that a rank may need."""
    return _GROUPS * (world_size - 1) + _OTHERS


def make_room(world_size: int) -> None:
    """Raise this process's limit of open files as far as the run needs and the system lets it, and let gloo connect
    lazily.

    Args:
        world_size: Number of ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed(world_size) if hard == resource.RLIM_INFINITY else min(needed(world_size), hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a system whose own limit is lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if world_size > LAZY:
        os.environ.setdefault(_VARIABLE, "1")  # torch has no option for it (torch 2.13, distributed_c10d.py)
