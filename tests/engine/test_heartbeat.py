"""A process that answers nothing although its connection is open: the others end, once they have waited for it."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from unishard.failures import heartbeat, process_state
from unishard.failures.connections import connect
from unishard.failures.deadlocks import Diagnosis
from unishard.failures.heartbeat import SILENT, HeartbeatTimeout
from unishard.failures.monitor_client import MonitorClient
from unishard.failures.monitor_server import MonitorServer

PATIENCE = 0.2
STATUS = {"anything": "a rank that stands still"}


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "100"])
    yield process
    process.kill()
    process.wait()


@contextmanager
def two_ranks(silent: int, number: int) -> Iterator[MonitorClient]:
    """The client of the rank that runs; the other one, of another process, keeps its connection open and says nothing."""
    process = [process_state.own()[0], number]
    if silent == 0:
        listener = socket.create_server(("localhost", 0))
        connection = socket.create_connection(listener.getsockname())
        accepted = listener.accept()[0]
        listener.close()
        client = MonitorClient(connection, 1, 2, None, process)
    else:
        server = MonitorServer(2, "token", lambda statuses: Diagnosis(), lambda rank: False)
        connections = [
            connect("localhost", server.port, {"token": "token", "rank": rank, "size": 2, "process": process})
            for rank in (0, 1)
        ]
        assert connections[0] is not None
        client = MonitorClient(connections[0], 0, 2, server)
        accepted = connections[1]
    client.be_patient(PATIENCE)
    try:
        yield client
    finally:
        client._closed = True
        client._socket.close()
        accepted.close()


def wait_for_news(client: MonitorClient, seconds: float) -> bool:
    """As the watchdog of a rank that stands still."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        client.ask()
        if client.wait(lambda: client.doomed, 0.05):
            return True
    return False


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_is_named_while_somebody_waits_for_it(
    stopped: int, sleeper: subprocess.Popen[bytes]
) -> None:
    sleeper.send_signal(signal.SIGSTOP)
    with two_ranks(stopped, sleeper.pid) as client:
        client.status(STATUS)
        assert wait_for_news(client, 10.0)
        assert client.endings[stopped].how == SILENT
        assert (
            client.cause() == f"rank {stopped} has not answered for 1 s: its process is stopped (SIGSTOP, a debugger)"
        )
        assert client.wait(lambda: client.is_gone(stopped), 2.0), "nobody waits for what it writes"


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_answers_nothing_and_runs_is_waited_for(
    silent: int, sleeper: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """As one that holds Python's lock while it reads a large JSON file."""
    with two_ranks(silent, sleeper.pid) as client:
        client.status(STATUS)
        assert not wait_for_news(client, 3 * 6 * PATIENCE)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"rank {silent} has not answered for 1 s: it runs code that holds Python's lock, or is stopped; it is waited for"
    ]


def test_a_process_of_another_machine_is_not_known_to_be_stopped(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.send_signal(signal.SIGSTOP)
    assert not process_state.is_stopped(["another machine", sleeper.pid])
    assert not process_state.is_stopped(None)


def test_a_rank_that_answers_is_waited_for() -> None:
    server = MonitorServer(2, "token", lambda statuses: Diagnosis(), lambda rank: False)
    connections = [connect("localhost", server.port, {"token": "token", "rank": rank, "size": 2}) for rank in (0, 1)]
    clients = [
        MonitorClient(connection, rank, 2, server if rank == 0 else None) for rank, connection in enumerate(connections)
    ]
    for client in clients:
        client.be_patient(PATIENCE)
    clients[0].status(STATUS)  # the other one computes
    clients[1].status(STATUS)
    assert not wait_for_news(clients[1], 2 * 6 * PATIENCE)
    assert not clients[0].doomed
    for client in clients:
        client._closed = True
        client._socket.close()


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
