"""The default process group of a run, the same for both engines, and its clean shutdown."""

from __future__ import annotations

import atexit
import gc
import sys
import time
import warnings
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unishard.config.topology import Topology, forgotten_srun, rendezvous
from unishard.distributed import arrival, descriptors, devices, launcher, lifeline
from unishard.distributed.agreement import agree
from unishard.patches import CORE_PATCHES

__all__ = [
    "TIMEOUT",
    "agree",
    "borrow_group",
    "device_of",
    "ended_by",
    "ensure",
    "give_back",
    "host_group",
    "shutdown",
]

TIMEOUT = timedelta(minutes=30)
"""Timeout of collectives, over gloo and NCCL; when it expires, torch ends the process with its own report."""

_failed = False
"""Whether an engine was closed by an error: collectives may be pending on this rank or on others."""


def device_of(topology: Topology) -> torch.device:
    """The device of this rank: its own CUDA device if there is one, else the CPU."""
    return torch.device("cuda", devices.choose(topology, shared=True)) if torch.cuda.is_available() else torch.device("cpu")


def ensure(topology: Topology, *, patience: float | None = None) -> Topology:
    """Initialize the default process group, or use the one that the caller has initialized. Collective.

    CUDA ranks get `cpu:gloo,cuda:nccl`, for collectives on tensors of either device, and their device becomes the current one; CPU ranks
    get gloo. A plain `python script.py` becomes a group of one rank without using the network.

    Args:
        topology: The ranks.
        patience: `communication.desync_timeout`; the ranks are then connected first, so that one that ends or does not answer is known to
            the others (`lifeline`). None to connect nothing.

    Returns:
        The topology with the rank and world size of the actual group.

    Raises:
        ConfigError: The launcher's environment has no rendezvous address, or a rank has no CUDA device of its own.
        RankMismatchError: Another rank has ended before it came here; with `patience`.
    """
    if patience is not None:
        launcher.watch()
    cuda, started = torch.cuda.is_available(), dist.is_initialized()
    if cuda:
        devices.use(devices.choose(topology, shared=started and "nccl" not in dist.get_backend_config()))
    if started:
        if patience is not None:
            arrival.join_group(TIMEOUT, patience)
        return replace(topology, rank=dist.get_rank(), world_size=dist.get_world_size())
    meet: dict[str, Any] = {"init_method": rendezvous(topology)}
    if meet["init_method"] is None:
        meet = {"store": dist.HashStore()}  # type: ignore[attr-defined]  # torch 2.13 exports it without __all__
    elif patience is not None and topology.world_size > 1:
        meet = {"store": arrival.meet(topology, TIMEOUT, patience)}
    if topology.launcher == "python" and (forgotten := forgotten_srun()) is not None:
        warnings.warn(forgotten, UserWarning, stacklevel=3)
    descriptors.make_room(topology.world_size)
    # No `device_id`: with one, `new_group` for a gloo group of some ranks deadlocks, since only the ranks outside the group split NCCL's
    # communicator (torch 2.11 to 2.14, distributed_c10d.py, _new_process_group_helper).
    with lifeline.asking():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo", rank=topology.rank, world_size=topology.world_size, timeout=TIMEOUT, **meet
        )
    atexit.register(shutdown)
    arrival.started()
    if cuda and topology.world_size > 1:
        with lifeline.asking():
            devices.refuse_shared(torch.cuda.current_device())
    return topology


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
    """A gloo group of all ranks for one background thread: threads must not share a group, or their messages mix. Collective.

    All ranks must borrow and give back in the same order.
    """
    world = dist.group.WORLD
    spare = _spare_groups.get(world)
    return spare.pop() if spare else dist.new_group(backend="gloo")


def give_back(group: dist.ProcessGroup, world: Any) -> None:
    """Return a borrowed group for reuse. It is not destroyed, since a slower rank may still be reading its last message.

    Args:
        group: From `borrow_group`; no longer in use.
        world: The default group at that time.
    """
    if dist.is_initialized() and world is dist.group.WORLD:
        _spare_groups.setdefault(world, []).append(group)


def ended_by(error: BaseException | None) -> None:
    """Record how an engine was closed: after an error, `shutdown` does not wait for ranks that may never arrive."""
    global _failed
    _failed = _failed or not (error is None or isinstance(error, SystemExit | GeneratorExit))


def shutdown() -> None:
    """Destroy the process group so that the interpreter exits cleanly. Safe to call twice.

    A gloo worker thread that drops the last reference to a finished collective during interpreter finalization aborts the process
    (pytorch issues 38228 and 190489, torch 2.13). Letting those threads run once, with the GIL released, after the last collective and
    before finalization prevents it.

    After an error NCCL's communicators are aborted, because destroying them waits for pending collectives.
    """
    global _failed
    arrival.leave()
    if not dist.is_initialized():
        return
    _host_groups.clear()
    _spare_groups.clear()
    gc.collect()
    time.sleep(0.1)
    # Set by the interpreter for an unhandled exception, before atexit handlers run.
    failed, _failed = _failed or getattr(sys, "last_value", None) is not None, False
    if failed and "nccl" in dist.get_backend_config():
        _abort()
    else:
        dist.destroy_process_group()


def _abort() -> None:
    """Abort all communicators, or only those of the default group if torch has no function for all."""
    if CORE_PATCHES["abort-all-groups"].works:
        dist.distributed_c10d._abort_process_group()
    elif dist.group.WORLD is not None:
        dist.group.WORLD.abort()
