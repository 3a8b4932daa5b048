"""A transfer of the script's own that takes long while other ranks are in the next forward ends no run."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
import torch.distributed as dist
from harness import BACKENDS, checked, my_rank, own_share, train

import unishard
from unishard.testing import run_ranks
from unishard.testing.models import MODELS

pytestmark = pytest.mark.ranks

TIMEOUT = 0.6
"""`communication.desync_timeout`."""
RATE, SIZE = 1_000_000, 4_500_000
"""Bytes a second of a connection, and bytes of the transfer: longer than six timeouts."""
_PACING = 47
"""SO_MAX_PACING_RATE of socket(7), which Python has no name for."""


def slow_down() -> None:
    """Limit each connection of this process."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as connection:
                connection.setsockopt(socket.SOL_SOCKET, _PACING, RATE)
        except OSError:
            continue


def sends_in_the_background(tensor):
    if my_rank() == 0:
        return dist.isend(tensor, 1)
    return dist.recv(tensor, 0) if my_rank() == 1 else None


def sends_to_one(tensor):
    if my_rank() == 0:
        dist.send(tensor, 1)
    if my_rank() == 1:
        dist.recv(tensor, 0)


def reduces_in_the_background(tensor):
    handle = dist.all_reduce(tensor, async_op=True)
    return handle.wait() if my_rank() == 0 else handle


def broadcasts_in_the_background(tensor):
    handle = dist.broadcast(tensor, 0, async_op=True)
    return handle.wait() if my_rank() == 1 else handle


CASES = {
    BACKENDS[0]: (sends_in_the_background, reduces_in_the_background),
    BACKENDS[1]: (sends_to_one, broadcasts_in_the_background),
}


def updates_around(backend):
    """Seconds of each transfer, on the rank that waits for it."""
    cfg, seconds = checked(backend, communication={"desync_timeout": TIMEOUT}), []
    with unishard.prepare(MODELS["mlp"].build(), cfg) as engine:
        train(engine, own_share(11))  # the calls of later updates are not compared
        slow_down()
        for transfer in CASES[backend]:
            began = time.monotonic()
            handle = transfer(torch.zeros(SIZE, dtype=torch.uint8))
            seconds.append(time.monotonic() - began)
            train(engine, own_share(1))
            if isinstance(handle, dist.Work):
                handle.wait()
            engine.mean(1.0)
        return seconds


@cache
def played():
    """The ranks wait most of the time."""
    with ThreadPoolExecutor(len(CASES)) as pool:
        runs = pool.map(lambda backend: run_ranks(3, updates_around, backend, timeout=120), CASES)
        return dict(zip(CASES, runs, strict=True))


@pytest.mark.parametrize("backend", CASES)
def test_slow_transfers_are_waited_for(backend):
    for seconds in zip(*played()[backend], strict=True):
        assert max(seconds) > 6 * TIMEOUT, "it was not slow"
