"""The default process group of a run, the same for both engines: its start under the monitor, and its clean
shutdown.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import logging
import os
import resource
import socket
import sys
import time
import warnings
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unishard.config.launchers import forgotten_srun, life
from unishard.config.rendezvous import rendezvous, store_of_launcher
from unishard.config.topology import Topology
from unishard.contract.private_api import CORE_PRIVATE_API
from unishard.distributed import process_group, serving
from unishard.distributed.process_group import TIMEOUT, forget_groups
from unishard.errors import ConfigError, Problem, RankMismatchError
from unishard.failures import excepthook, launcher, monitor_client, prelaunch_errors, second_signal
from unishard.failures.endings import headline
from unishard.failures.monitor_server import DIED, RAISED

# The ranks meet before the process group starts: waits that can be interrupted, and that name the ranks that are
# missing.

_CALLS = "unishard.prepare, unishard.init or unishard.from_pretrained"
_STORELESS = (
    "your process group has no store, so its ranks do not hear of each other's errors; return from its get_group_store "
    "the store that torch.distributed.init_process_group gave it"
)
_PATIENCE = 10.0
"""Seconds until a rank that is waited for is named in a warning."""
_FAREWELL = 3.0
"""Seconds in which a rank that fails tries to tell those that wait for it."""
_POLL, _ATTEMPT = 0.05, 5.0
"""Seconds between two attempts to reach rank 0, and of one, where nothing answers."""

_logger = logging.getLogger("unishard")
_world: Any = None
"""The process group of the caller that has a line."""


def connect(topology: Topology, timeout: timedelta, patience: float) -> Any:
    """Wait for all ranks, and connect them. Collective.

    Args:
        topology: The ranks.
        timeout: How long to wait for rank 0.
        patience: `communication.desync_timeout`.

    Returns:
        The store for the process group.

    Raises:
        ConfigError: Ranks were started with the same number, or with another number of ranks.
        RankMismatchError: A rank has ended instead of coming here, or is later than the timeout.
    """
    method = rendezvous(topology)
    assert method is not None
    prelaunch_errors.install()
    second_signal.install()
    host, port, served = store_of_launcher(method)
    with serving.serving(port):
        store = _store(topology, method, host, port, timeout, serves=topology.rank == 0 and not served)
    line = _line(store, topology.rank, topology.world_size, [host], timeout, patience, local=serving.is_local(host))
    if line is not None:
        there = line.collect("arrived", "", what=f"to call {_CALLS}", patience=_PATIENCE)
        if line.verdict:
            raise ConfigError([Problem("", line.verdict)])
        if len(there) < topology.world_size:
            raise RankMismatchError(f"{line.cause(1.0)}, before it called {_CALLS}")
    return dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined]  # torch 2.13 exports it without __all__


def join_group(timeout: timedelta, patience: float) -> None:
    """Connect the ranks of a process group that the caller has started. Collective; does nothing the second time.

    Args:
        timeout: How long to wait for rank 0.
        patience: `communication.desync_timeout`.

    Raises:
        RankMismatchError: Rank 0 has ended instead of coming here, or is later than the timeout.
    """
    global _world
    if dist.get_world_size() == 1 or monitor_client.current() is not None or _world is dist.group.WORLD:
        return
    _world = dist.group.WORLD
    second_signal.install()
    store = _store_of_group()
    if store is None:  # of a class in Python
        _logger.warning(_STORELESS)
        return
    _line(store, dist.get_rank(), dist.get_world_size(), [], timeout, patience)


def _line(
    store: Any, rank: int, size: int, hosts: list[str], timeout: timedelta, patience: float, *, local: bool = False
) -> Any:
    """The line of this process, whose errors are from now on written with those of the other ranks; None where there is
    none.
    """
    if rank:
        _await_rank_0(store, rank, timeout.total_seconds())
    line = monitor_client.open_line(store, rank, size, hosts, local=local)
    if line is not None:
        line.be_patient(patience)
        excepthook.install(line)
    return line


def _await_rank_0(store: Any, rank: int, seconds: float) -> None:
    try:
        if not monitor_client.is_served(store, _PATIENCE):
            _logger.warning("rank %d has waited %.0f s for rank 0 to call %s", rank, _PATIENCE, _CALLS)
            if not monitor_client.is_served(store, seconds):
                raise RankMismatchError(f"rank 0 did not call {_CALLS} within {seconds:.0f} s")
    except dist.DistNetworkError:  # it serves the store
        raise RankMismatchError(f"{monitor_client.Ending(0, '', DIED)}, before it called {_CALLS}") from None


def _store_of_group() -> Any:
    group: Any = dist.group.WORLD
    return group.get_group_store()


def announce_failure(error: BaseException) -> None:
    """Tell ranks that wait in `connect` that this one ends instead of coming.

    Args:
        error: Why.
    """
    if dist.is_initialized():
        store, rank, size, hosts, local = _store_of_group(), dist.get_rank(), dist.get_world_size(), [], False
    else:
        topology = Topology.from_environment()
        rank, size = topology.rank, topology.world_size
        method = rendezvous(topology)
        assert method is not None
        host, port, served = store_of_launcher(method)
        store = _store(topology, method, host, port, timedelta(seconds=_FAREWELL), serves=rank == 0 and not served)
        hosts, local = [host], serving.is_local(host)
    if rank and not monitor_client.is_served(store, _FAREWELL):
        return
    line = monitor_client.open_line(store, rank, size, hosts, local=local)
    if line is not None:
        line.end(f"raised {headline(error)}", RAISED)
        if rank == 0:
            line.wait(lambda: len(line.endings) == line.size, _FAREWELL)  # the others hear it when they come


def _note_start() -> None:
    """Note that the process group has started: torch has replaced `sys.excepthook`."""
    if (line := monitor_client.current()) is not None:
        excepthook.install(line)


def _leave() -> None:
    """Tell the other ranks that this one ends without an error, unless they have heard of one."""
    if (line := monitor_client.current()) is not None:
        line.close()
        monitor_client.forget()


def _store(topology: Topology, method: str, host: str, port: int, timeout: timedelta, *, serves: bool) -> Any:
    if serves:
        # Unlike torch's rendezvous, which waits for the others inside C++ until the timeout.
        return serving.serve(host, port, topology.world_size, timeout)
    began, warned = time.monotonic(), False
    while True:
        try:
            socket.create_connection((host, port), _ATTEMPT).close()
            break
        except OSError as error:
            waited = time.monotonic() - began
            if waited > timeout.total_seconds():
                raise RankMismatchError(
                    f"rank 0 did not call {_CALLS} within {waited:.0f} s ({host}, port {port}: {error})"
                ) from None
            if waited > _PATIENCE and not warned:
                warned = True
                _logger.warning(
                    "rank %d has waited %.0f s for rank 0 to call %s (%s, port %d: %s); if rank 0 runs, check that "
                    "MASTER_ADDR and MASTER_PORT are its own, and that this machine can reach them",
                    topology.rank,
                    waited,
                    _CALLS,
                    host,
                    port,
                    error,
                )
            time.sleep(_POLL)
    store = serving.connect(method, topology.rank, topology.world_size, timeout, f"{host}:{port}")
    # Ranks that torchrun has started anew would find addresses of those that are gone.
    return dist.PrefixStore(life(), store) if life() else store  # type: ignore[attr-defined]  # torch 2.13 exports it without __all__


# File descriptors of a large run: each gloo group connects every rank with every other one, three groups in a run of
# unishard.

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


_failed = False
"""Whether an engine was closed by an error: collectives may be pending on this rank or on others."""
_process = 0
"""The process that has started or joined the group."""


def ensure(topology: Topology, *, patience: float | None = None) -> Topology:
    """Initialize the default process group, or use the one that the caller has initialized. Collective.

    CUDA ranks get `cpu:gloo,cuda:nccl`, for collectives on tensors of either device, and their device becomes the
    current one; CPU ranks get gloo. A plain `python script.py` becomes a group of one rank without using the network.

    Args:
        topology: The ranks.
        patience: `communication.desync_timeout`; the ranks are then connected first, so that one that ends or does not
            answer is known to the others (`monitor_client`). None to connect nothing.

    Returns:
        The topology with the rank and world size of the actual group.

    Raises:
        ConfigError: The launcher's environment has no rendezvous address, or a rank has no CUDA device of its own.
        RankMismatchError: Another rank has ended before it came here; with `patience`.
    """
    global _process
    _process = os.getpid()
    if patience is not None:
        launcher.watch()
    cuda, started = torch.cuda.is_available(), dist.is_initialized()
    if cuda:
        process_group.use(process_group.choose(topology, shared=started and "nccl" not in dist.get_backend_config()))
    if started:
        if patience is not None:
            join_group(TIMEOUT, patience)
        return replace(topology, rank=dist.get_rank(), world_size=dist.get_world_size())
    meet: dict[str, Any] = {"init_method": rendezvous(topology)}
    if meet["init_method"] is None:
        meet = {"store": dist.HashStore()}  # type: ignore[attr-defined]  # torch 2.13 exports it without __all__
    elif patience is not None and topology.world_size > 1:
        meet = {"store": connect(topology, TIMEOUT, patience)}
    if topology.launcher == "python" and (forgotten := forgotten_srun()) is not None:
        warnings.warn(forgotten, UserWarning, stacklevel=3)
    make_room(topology.world_size)
    # No `device_id`: with one, `new_group` for a gloo group of some ranks deadlocks, since only the ranks outside the
    # group split NCCL's communicator (torch 2.11 to 2.14, distributed_c10d.py, _new_process_group_helper).
    with monitor_client.asking():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=TIMEOUT,
            **meet,
        )
    atexit.register(shutdown)
    _note_start()
    if cuda and topology.world_size > 1:
        with monitor_client.asking():
            process_group.refuse_shared(torch.cuda.current_device())
    return topology


def is_forked() -> bool:
    """Whether a rank has forked this process, which has the connections and engines of that rank, and none of its
    own.
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
    _leave()
    if not dist.is_initialized():
        return
    forget_groups()
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
    for held in gc.get_referents(*gc.get_objects()):
        if issubclass(type(held), dist.ProcessGroup):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def _abort() -> None:
    """Abort all communicators, or only those of the default group if torch has no function for all."""
    if CORE_PRIVATE_API["abort-all-groups"].works:
        dist.distributed_c10d._abort_process_group()
    elif dist.group.WORLD is not None:
        dist.group.WORLD.abort()
