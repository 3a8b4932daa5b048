"""A process that answers nothing although its connection is open: the others end, once they have waited for it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from unishard.failures import heartbeat
from unishard.failures.connections import connect
from unishard.failures.heartbeat import SILENT, HeartbeatTimeout
from unishard.failures.monitor_client import MonitorClient
from unishard.failures.monitor_server import MonitorServer
from unishard.failures.verdict import Judgement

PATIENCE = 0.2
STATUS = {"anything": "a rank that stands still"}


@contextmanager
def two_ranks(stopped: int) -> Iterator[MonitorClient]:
    """The line of the rank that runs; the other one keeps its connection open and says nothing."""
    if stopped == 0:
        listener = socket.create_server(("localhost", 0))
        connection = socket.create_connection(listener.getsockname())
        accepted = listener.accept()[0]
        listener.close()
        line = MonitorClient(connection, 1, 2, None)
    else:
        server = MonitorServer(2, "token", lambda statuses: Judgement(), lambda rank: False)
        connections = [
            connect("localhost", server.port, {"token": "token", "rank": rank, "size": 2}) for rank in (0, 1)
        ]
        assert connections[0] is not None
        line = MonitorClient(connections[0], 0, 2, server)
        accepted = connections[1]
    line.be_patient(PATIENCE)
    try:
        yield line
    finally:
        line._closed = True
        line._socket.close()
        accepted.close()


def wait_for_news(line: MonitorClient, seconds: float) -> bool:
    """As the watchdog of a rank that stands still."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        line.ask()
        if line.wait(lambda: line.doomed, 0.05):
            return True
    return False


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_answers_nothing_is_named_while_somebody_waits_for_it(stopped: int) -> None:
    with two_ranks(stopped) as line:
        line.status(STATUS)
        assert wait_for_news(line, 10.0)
        assert line.endings[stopped].how == SILENT
        assert (
            line.cause()
            == f"rank {stopped} has not answered for 1 s: its process is stopped (SIGSTOP, a debugger), or its machine "
            "hangs"
        )
        assert line.wait(lambda: line.is_gone(stopped), 2.0), "nobody waits for what it writes"


def test_a_rank_that_answers_is_waited_for() -> None:
    server = MonitorServer(2, "token", lambda statuses: Judgement(), lambda rank: False)
    connections = [connect("localhost", server.port, {"token": "token", "rank": rank, "size": 2}) for rank in (0, 1)]
    lines = [
        MonitorClient(connection, rank, 2, server if rank == 0 else None) for rank, connection in enumerate(connections)
    ]
    for line in lines:
        line.be_patient(PATIENCE)
    lines[0].status(STATUS)  # the other one computes
    lines[1].status(STATUS)
    assert not wait_for_news(lines[1], 2 * 6 * PATIENCE)
    assert not lines[0].doomed
    for line in lines:
        line._closed = True
        line._socket.close()


def test_time_in_which_this_process_was_stopped_itself_does_not_count(monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    found = HeartbeatTimeout()
    found.look((1,))
    for passed in (3600.0, 0.5, 0.5):
        now += passed
        assert found.look((1,)) == (False, [])
    for _ in range(300):
        now += 1.0
        last = found.look((1,))
    assert last[1] == [1]
    found.rest()
    assert found.look((1,))[1] == []
