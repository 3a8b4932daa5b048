"""The store where the ranks of a run meet, served by rank 0: on this machine only, where its address is one that no
other can reach.

Where another program has the port, torch's client waits in C++ forever, whatever its timeout.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from unishard.config.launchers import has_one_agent
from unishard.errors import ConfigError, Problem, RankMismatchError


def is_local(host: str) -> bool:
    """Whether all ranks are on one machine, so that nothing has to listen to others.

    Args:
        host: The address of rank 0.
    """
    return is_loopback(host) or has_one_agent()


def is_loopback(host: str) -> bool:
    """Whether an address is one that only its own machine can reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(host: str, port: int, size: int, timeout: timedelta) -> Any:
    """Serve a store. It listens to other machines only if its address is one that they can reach.

    Args:
        host: The address, as all ranks know it.
        port: The port.
        size: Number of ranks.
        timeout: Of requests.
    """
    options: dict[str, Any] = {}
    if is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError):  # a store of this process serves there already
            # torch itself listens on all addresses (torch 2.13, TCPStoreLibUvBackend.cpp).
            options["master_listen_fd"] = socket.create_server((host, port), family=family, backlog=size).detach()
    server: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch 2.13 exports it without __all__
    return server(
        host, port, size, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True, **options
    )


_ANSWER = 60.0
"""Seconds in which what listens there must answer as a store does."""
_PATIENCE = 10.0
"""Seconds until a warning."""

_logger = logging.getLogger("unishard")


@contextmanager
def serving(port: int) -> Iterator[None]:
    """A block in which this process starts to serve a store.

    Raises:
        ConfigError: Another program has the port.
    """
    try:
        yield
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        problem = (
            f"MASTER_PORT={port} is in use by another program on this machine, that of rank 0; set MASTER_PORT to a "
            "free port, and RANK=0 for one process only"
        )
        raise ConfigError([Problem("", problem)]) from error


def connect(method: str, rank: int, size: int, timeout: timedelta, where: str) -> Any:
    """Connect to the store that rank 0 or the launcher serves.

    Args:
        method: As `init_method` of torch.
        rank: This rank.
        size: Number of ranks.
        timeout: Of requests.
        where: Host and port, for the message.

    Raises:
        RankMismatchError: What listens there does not answer.
    """
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(next(rendezvous(method, rank, size, timeout=timeout))[0])
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=ask, name="unishard-connect", daemon=True)  # stays in C++ if nothing answers
    thread.start()
    answer = min(_ANSWER, timeout.total_seconds())
    thread.join(min(_PATIENCE, answer))
    if not answers and answer > _PATIENCE:
        _logger.warning(
            "rank %d has waited %.0f s for an answer from %s; check that MASTER_ADDR and MASTER_PORT are those of rank "
            "0 on every host, and that no other program listens there",
            rank,
            _PATIENCE,
            where,
        )
        thread.join(answer - _PATIENCE)
    if not answers:
        raise RankMismatchError(
            f"what listens at {where} does not answer as rank 0: another program has that port, or the machine hangs; "
            "set MASTER_PORT to a free port"
        )
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]
