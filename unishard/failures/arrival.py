"""Connect all ranks before the process group starts. The waits can be interrupted, and name the ranks that are
missing.
"""

from __future__ import annotations

import logging
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unishard.config.launchers import restart_prefix
from unishard.config.rendezvous import rendezvous, store_of_launcher
from unishard.config.topology import Topology
from unishard.distributed import serving
from unishard.errors import ConfigError, Problem, RankMismatchError
from unishard.failures import excepthook, monitor_client, second_signal
from unishard.failures.endings import headline
from unishard.failures.monitor_server import DIED, RAISED
from unishard.failures.rank_ending import Ending

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
"""The process group of the caller that has a monitor."""


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
    second_signal.install()
    host, port, served = store_of_launcher(method)
    with serving.serving(port):
        store = _store(topology, method, host, port, timeout, serves=topology.rank == 0 and not served)
    monitor = _connection(
        store, topology.rank, topology.world_size, [host], timeout, patience, local=serving.is_local(host)
    )
    if monitor is not None:
        there = monitor.collect("arrived", "", purpose=f"to call {_CALLS}", patience=_PATIENCE)
        if monitor.abort_reason:
            raise ConfigError([Problem("", monitor.abort_reason)])
        if len(there) < topology.world_size:
            raise RankMismatchError(f"{monitor.cause(1.0)}, before it called {_CALLS}")
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
    _connection(store, dist.get_rank(), dist.get_world_size(), [], timeout, patience)


def _connection(
    store: Any, rank: int, size: int, hosts: list[str], timeout: timedelta, patience: float, *, local: bool = False
) -> Any:
    """Connect this process to the monitor, and let `excepthook` write its errors; None if it cannot be reached."""
    if rank:
        _await_rank_0(store, rank, timeout.total_seconds())
    monitor = monitor_client.open_client(store, rank, size, hosts, local=local)
    if monitor is not None:
        monitor.be_patient(patience)
        excepthook.install(monitor)
    return monitor


def _await_rank_0(store: Any, rank: int, seconds: float) -> None:
    try:
        if not monitor_client.is_served(store, _PATIENCE):
            _logger.warning("rank %d has waited %.0f s for rank 0 to call %s", rank, _PATIENCE, _CALLS)
            if not monitor_client.is_served(store, seconds):
                raise RankMismatchError(f"rank 0 did not call {_CALLS} within {seconds:.0f} s")
    except dist.DistNetworkError:  # it serves the store
        raise RankMismatchError(f"{Ending(0, '', DIED)}, before it called {_CALLS}") from None


def _store_of_group() -> Any:
    group: Any = dist.group.WORLD
    return group.get_group_store()


def announce_failure(error: BaseException) -> None:
    """Tell ranks that wait in `connect` that this one ends before it connects.

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
    monitor = monitor_client.open_client(store, rank, size, hosts, local=local)
    if monitor is not None:
        monitor.end(f"raised {headline(error)}", RAISED)
        if rank == 0:
            monitor.wait(lambda: len(monitor.endings) == monitor.size, _FAREWELL)  # the others hear it when they come


def note_start() -> None:
    """Note that the process group has started: torch has replaced `sys.excepthook`."""
    if (monitor := monitor_client.current()) is not None:
        excepthook.install(monitor)


def leave() -> None:
    """Tell the other ranks that this one ends without an error, unless they have heard of one."""
    if (monitor := monitor_client.current()) is not None:
        monitor.close()
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
    return dist.PrefixStore(restart_prefix(), store) if restart_prefix() else store  # type: ignore[attr-defined]  # torch 2.13 exports it without __all__
