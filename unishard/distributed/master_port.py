"""The port where the ranks meet, when another program has it: torch's client then waits in C++ forever, whatever its
timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from unishard.errors import ConfigError, Problem, RankMismatchError

_ANSWER = 60.0
"""Seconds in which what listens there must answer as a store does."""


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
        what = (
            f"MASTER_PORT={port} is in use by another program on this machine, that of rank 0; set MASTER_PORT to a "
            "free port"
        )
        raise ConfigError([Problem("", what)]) from error


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
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(next(rendezvous(method, rank, size, timeout=timeout))[0])
        except Exception as error:
            found.append(error)

    asking = threading.Thread(target=ask, name="unishard-connect", daemon=True)  # stays in C++ if nothing answers
    asking.start()
    asking.join(min(_ANSWER, timeout.total_seconds()))
    if not found:
        raise RankMismatchError(
            f"what listens at {where} does not answer as rank 0: another program has that port, or the machine hangs; "
            "set MASTER_PORT to a free port"
        )
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]
