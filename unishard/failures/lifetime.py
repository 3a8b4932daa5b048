"""The default process group of a run, the same for both engines: its start under the monitor, and its clean
shutdown.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import sys
import time
import warnings
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unishard.config.communication import Communication
from unishard.config.launchers import forgotten_srun
from unishard.config.rendezvous import rendezvous
from unishard.config.topology import Topology
from unishard.contract.private_api import CORE_PRIVATE_API
from unishard.distributed import devices, process_group
from unishard.distributed.descriptors import make_room
from unishard.failures import launcher, monitor_client, prelaunch_errors
from unishard.failures.arrival import connect, join_group, leave, note_start

_failed = False
"""Whether an engine was closed by an error: collectives may be pending on this rank or on others."""
_process = 0
"""The process that has started or joined the group."""


def ensure(topology: Topology, communication: Communication | None = None) -> Topology:
    """Initialize the default process group, or use the one that the caller has initialized. Collective.

    CUDA ranks get `cpu:gloo,cuda:nccl`, for collectives on tensors of either device, and their device becomes the
    current one; CPU ranks get gloo. A plain `python script.py` becomes a group of one rank without using the network.

    Args:
        topology: The ranks.
        communication: With it, the ranks are connected first, so that one that ends or does not answer is known to the
            others (`monitor_client`).

    Returns:
        The topology with the rank and world size of the actual group.

    Raises:
        ConfigError: The launcher's environment has no rendezvous address, or a rank has no CUDA device of its own.
        RankMismatchError: Another rank has ended before it came here; with `communication`.
    """
    global _process
    _process = os.getpid()
    if communication is not None:
        launcher.watch()
    cuda, started = torch.cuda.is_available(), dist.is_initialized()
    if cuda:
        devices.use(devices.choose(topology, shared=started and "nccl" not in dist.get_backend_config()))
    if started:
        if communication is not None:
            join_group(_choose_timeout(communication.timeout), communication.desync_timeout)
        return replace(topology, rank=dist.get_rank(), world_size=dist.get_world_size())
    timeout = _choose_timeout(None if communication is None else communication.timeout)
    meet: dict[str, Any] = {"init_method": rendezvous(topology)}
    if meet["init_method"] is None:
        meet = {"store": dist.HashStore()}  # type: ignore[attr-defined]  # torch 2.13 exports it without __all__
    elif communication is not None and topology.world_size > 1:
        prelaunch_errors.install()
        meet = {"store": connect(topology, timeout, communication.desync_timeout)}
    if topology.launcher == "python" and (forgotten := forgotten_srun()) is not None:
        warnings.warn(forgotten, UserWarning, stacklevel=3)
    make_room(topology.world_size)
    # No `device_id`: with one, `new_group` for a gloo group of some ranks deadlocks, since only the ranks outside the
    # group split NCCL's communicator (torch 2.11 to 2.14, distributed_c10d.py, _new_process_group_helper).
    with monitor_client.blocking_call():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=timeout,
            **meet,
        )
    atexit.register(shutdown)
    note_start()
    if cuda and topology.world_size > 1:
        with monitor_client.blocking_call():
            devices.refuse_shared(torch.cuda.current_device())
    return topology


def _choose_timeout(seconds: float | None) -> timedelta:
    """Set the timeout of collectives, also of the process group in use if there is one.

    Args:
        seconds: `communication.timeout`; None for what the process group has.
    """
    world: Any = dist.group.WORLD
    if seconds is None:
        timeout = process_group.DEFAULT if world is None else _timeout_of(world)
    else:
        timeout = timedelta(seconds=seconds)
        if world is not None:
            world.set_timeout(timeout)
    process_group.set_timeout(timeout)
    return timeout


def _timeout_of(world: Any) -> timedelta:
    device = torch.device(dist.get_backend_config().partition(":")[0])
    with contextlib.suppress(AttributeError, RuntimeError):  # a process group of a class in Python
        if CORE_PRIVATE_API["group-timeout"].works:
            timeout: timedelta = world._get_backend(device).options._timeout
            return timeout
    return process_group.DEFAULT


def is_forked() -> bool:
    """Whether a rank has forked this process. A forked process has copies of the rank's connections and engines, and
    none of its own.
    """
    return _process not in (0, os.getpid())


def ended_by(error: BaseException | None) -> None:
    """Record how an engine was closed: after an error, `shutdown` does not wait for ranks that may never arrive."""
    global _failed
    _failed = _failed or not (error is None or isinstance(error, SystemExit | GeneratorExit))


def shutdown() -> None:
    """Destroy the process group so that the interpreter exits cleanly. Safe to call twice.

    A gloo worker thread that drops the last reference to a finished collective during interpreter finalization aborts
    the process (pytorch issues 38228 and 190489, torch 2.13). Letting those threads run once, with the GIL released,
    after the last collective and before finalization prevents it.

    After an error NCCL's communicators are aborted, because destroying them waits for pending collectives.
    """
    global _failed
    if is_forked():
        _keep_groups()
        return
    leave()
    if not dist.is_initialized():
        return
    process_group.forget_groups()
    gc.collect()
    time.sleep(0.1)
    # Set by the interpreter for an unhandled exception, before atexit handlers run.
    failed, _failed = _failed or getattr(sys, "last_value", None) is not None, False
    if failed and "nccl" in dist.get_backend_config():
        _abort()
    else:
        dist.destroy_process_group()


def _keep_groups() -> None:
    """Let the interpreter of a forked process never free its groups: gloo would wait for threads that only the rank
    has (torch 2.13, ProcessGroupGloo.cpp, ~ProcessGroupGloo).
    """
    for referent in gc.get_referents(*gc.get_objects()):
        if issubclass(type(referent), dist.ProcessGroup):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(referent))


def _abort() -> None:
    """Abort all communicators, or only those of the default group if torch has no function for all."""
    if CORE_PRIVATE_API["abort-all-groups"].works:
        dist.distributed_c10d._abort_process_group()
    elif dist.group.WORLD is not None:
        dist.group.WORLD.abort()
