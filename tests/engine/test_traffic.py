"""What counts as data on its way: what other ranks have not got yet, and many bytes; not what the monitor says."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from unishard.failures import traffic
from unishard.failures.traffic import Traffic

MANY = bytes(100_000)


class Line(NamedTuple):
    """A TCP connection of this process with itself."""

    near: socket.socket
    far: socket.socket

    def carry(self, data: bytes) -> None:
        """Send and receive."""
        self.near.sendall(data)
        assert len(self.far.recv(len(data), socket.MSG_WAITALL)) == len(data)


@pytest.fixture
def lines() -> Iterator[tuple[Line, Line]]:
    """To the monitor, and to another rank."""
    with ExitStack() as opened:
        made = []
        for _ in range(2):
            server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
            near = opened.enter_context(socket.create_connection(server.getsockname()))
            made.append(Line(near, opened.enter_context(server.accept()[0])))
        yield made[0], made[1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(traffic, "time", clock)
    return clock


def looks(seen: Traffic, clock: SimpleNamespace, seconds: float = 1.0) -> float:
    clock.now += seconds
    return seen.look()


def test_a_connection_that_carries_much_is_no_quiet_one(lines: tuple[Line, Line], clock: SimpleNamespace) -> None:
    monitor, rank = lines
    monitor.carry(b"hello")
    seen = Traffic(monitor.near.getpeername()[1])
    assert [looks(seen, clock) for _ in range(2)] == [1.0, 2.0]
    monitor.carry(MANY)
    rank.carry(b"a heartbeat")
    assert looks(seen, clock) == 3.0
    rank.carry(MANY)
    assert looks(seen, clock) == 0.0
    assert looks(seen, clock, 60.0) < 5.0, "this process was stopped"


def test_data_that_waits_to_be_sent_is_on_its_way(lines: tuple[Line, Line], clock: SimpleNamespace) -> None:
    monitor, rank = lines
    monitor.carry(b"hello")
    seen = Traffic(monitor.near.getpeername()[1])
    rank.near.setblocking(False)
    while True:  # until no buffer has room
        try:
            rank.near.send(MANY)
        except BlockingIOError:
            break
    looks(seen, clock)
    assert [looks(seen, clock) for _ in range(3)] == [0.0] * 3


def test_nothing_is_known_where_the_system_does_not_tell(lines: tuple[Line, Line], clock: SimpleNamespace) -> None:
    assert looks(Traffic(lines[0].near.getpeername()[1]), clock) == 0.0, "not even what the monitor has said"


def test_a_look_leaves_sockets_as_they_are(lines: tuple[Line, Line]) -> None:
    before = socket.getdefaulttimeout()
    try:
        socket.setdefaulttimeout(5.0)
        Traffic(0).look()
    finally:
        socket.setdefaulttimeout(before)
    assert all(os.get_blocking(line.near.fileno()) for line in lines)
    lines[1].carry(MANY)
