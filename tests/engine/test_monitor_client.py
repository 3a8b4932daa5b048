"""The monitor and the ranks' connections, all in this process: what a rank hears of the others, and when."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from unishard.distributed import serving
from unishard.errors import ConfigError
from unishard.failures.connections import connect
from unishard.failures.deadlocks import Diagnosis
from unishard.failures.monitor_client import MonitorClient
from unishard.failures.monitor_server import DIED, ENDED, FOLLOWED, RAISED, MonitorServer

TOKEN = "right"


@contextmanager
def ranks(
    size: int,
    connected: int | None = None,
    detect: Any = lambda statuses: Diagnosis(),
    unreachable: Any = lambda rank: False,
) -> Iterator:
    """Lines of the first ranks to one server."""
    server = MonitorServer(size, TOKEN, detect, unreachable or (lambda rank: False))
    clients = []
    for rank in range(size if connected is None else connected):
        connection = connect("localhost", server.port, {"token": TOKEN, "rank": rank, "size": size})
        assert connection is not None
        clients.append(MonitorClient(connection, rank, size, None))
    try:
        yield clients if connected is None else (server, clients)
    finally:
        for client in clients:
            client._closed = True
            client._socket.close()


def together(clients: list[MonitorClient], *args: Any, **kwargs: Any) -> list[dict[int, Any]]:
    """What each of these ranks gets from the same collection; it gives its rank where no value is passed."""
    answers: list[Any] = [None] * len(clients)

    def collect(index: int) -> None:
        answers[index] = clients[index].collect(args[0], args[1] if len(args) > 1 else clients[index].rank, **kwargs)

    threads = [threading.Thread(target=collect, args=(index,)) for index in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return answers


def die(client: MonitorClient) -> None:
    """End as a killed process does."""
    client._socket.shutdown(socket.SHUT_RDWR)


def test_all_ranks_get_the_values_of_all() -> None:
    with ranks(3) as clients:
        assert together(clients, "key") == [{0: 0, 1: 1, 2: 2}] * 3
        assert together(clients, "other", [1, "a"]) == [{0: [1, "a"], 1: [1, "a"], 2: [1, "a"]}] * 3


def test_a_rank_that_dies_is_known_at_once_and_no_longer_waited_for() -> None:
    with ranks(3) as clients:
        start = time.monotonic()
        threading.Timer(0.2, die, (clients[1],)).start()
        assert together([clients[0], clients[2]], "key") == [{0: 0, 2: 2}] * 2
        assert time.monotonic() - start < 2
        for client in (clients[0], clients[2]):
            assert client.endings[1].how == DIED
            assert client.is_gone(1)
            assert (
                client.cause()
                == "rank 1 is gone: its process ended without an error (killed, for lack of memory, or in C++)"
            )


def test_what_explains_the_end_of_a_run_comes_before_what_follows_from_it() -> None:
    with ranks(4) as clients:
        clients[3].end("has ended its program", ENDED)
        assert clients[0].cause(1.0) == "rank 3 has ended its program"
        clients[1].end("raised RankMismatchError: no", FOLLOWED)
        clients[2].end("raised ValueError: a broken sample", RAISED)
        clients[2].end("has ended its program", ENDED)  # at the end of the process; the first word counts
        assert all(client.wait(lambda client=client: 2 in client.endings, 1.0) for client in clients)
        assert clients[0].cause() == "rank 2 raised ValueError: a broken sample"
        assert [list(client.endings) for client in clients[:3]] == [[3, 1, 2]] * 3, "the same order everywhere"


def test_a_rank_that_comes_later_hears_of_those_that_have_ended() -> None:
    with ranks(3, connected=2) as (server, clients):
        clients[0].end("raised ValueError: no", RAISED)
        die(clients[1])
        assert clients[0].wait(lambda: clients[0].is_gone(1), 2.0)
        connection = connect("localhost", server.port, {"token": TOKEN, "rank": 2, "size": 3})
        assert connection is not None
        late = MonitorClient(connection, 2, 3, None)
        assert late.wait(lambda: late.is_gone(1), 2.0)
        assert str(late.others()[0]) == "rank 0 raised ValueError: no"
        die(late)


def test_the_end_of_rank_0_is_known_although_it_serves() -> None:
    with ranks(2) as clients:
        clients[0].end("raised ValueError: no", RAISED)
        die(clients[1])  # the connection breaks, as at the end of the monitor's process
        assert clients[1].wait(lambda: clients[1].is_gone(0), 2.0)
        assert clients[1].cause() == "rank 0 raised ValueError: no"
        assert clients[1].collect("key", 5) == {1: 5}


def test_a_collection_can_end_without_those_that_are_late_who_get_the_same() -> None:
    with ranks(3) as clients:
        assert together(clients[:2], "key", seconds=0.3) == [{0: 0, 1: 1}] * 2
        assert clients[2].collect("key", 2, seconds=0.3) == {0: 0, 1: 1}


def test_a_value_can_be_given_before_others_ask() -> None:
    with ranks(2) as clients:
        clients[1].give("key", "early")
        time.sleep(0.1)
        assert clients[0].collect("key", "asked", seconds=2.0) == {0: "asked", 1: "early"}


def test_ranks_that_are_waited_for_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with ranks(4, connected=2) as (_, clients), caplog.at_level(logging.WARNING, "unishard"):
        thread = threading.Thread(
            target=together, args=(clients, "key"), kwargs={"purpose": "to call prepare", "patience": 0.2}, daemon=True
        )
        thread.start()
        time.sleep(2.0)
        assert caplog.messages == ["rank 0 has waited 0 s for ranks 2, 3 to call prepare"]
        for client in clients:
            die(client)


def test_a_rank_that_cannot_connect_is_not_waited_for() -> None:
    with ranks(3, connected=2, unreachable=lambda rank: rank == 2) as (_, clients):
        assert together(clients, "key", patience=0.2) == [{0: 0, 1: 1}] * 2


def test_the_detector_hears_of_ranks_that_all_stand_still_and_is_heard_by_all() -> None:
    asked: list[Any] = []

    def detect(statuses: Any) -> Diagnosis:
        asked.append({rank: said for rank, (_, said) in statuses.items()})
        assert all(0 <= age < 60 for age, _ in statuses.values())
        return Diagnosis("no rank can go on" if asked[-1][1] == "stuck" else "")

    with ranks(2, detect=detect) as clients:
        clients[0].status("waits")
        clients[1].status("busy")
        clients[1].status(None)
        clients[0].status("waits")
        clients[1].status("stuck")
        assert all(client.wait(lambda client=client: bool(client.abort_reason), 2.0) for client in clients)
        assert {client.cause() for client in clients} == {"no rank can go on"}
        assert {0: "waits", 1: "busy"} in asked
        assert all(len(statuses) == 2 for statuses in asked)


@pytest.mark.parametrize(
    "hello", [{"token": "wrong", "rank": 1, "size": 2}, {"token": TOKEN, "rank": 2, "size": 2}, {"rank": 1}, []]
)
def test_a_stranger_is_refused(hello: Any) -> None:
    with ranks(2, connected=1) as (server, clients):
        assert connect("localhost", server.port, hello) is None
        with socket.create_connection(("localhost", server.port)) as connection:
            connection.sendall(b"\x00\xff not json\n")
            assert connection.recv(1) == b""
        assert not clients[0].endings
        assert json.dumps(clients[0].collect("key", 1, seconds=0.2)) == '{"0": 1}'


MISPLACED = [
    (0, 3, "two processes were started as rank 0; set another RANK for each, from 0 to 2"),
    (2, 4, "rank 2 was started as one of 4 ranks, and rank 0 as one of 3; set the same WORLD_SIZE for every process"),
]


@pytest.mark.parametrize(("rank", "size", "why"), MISPLACED)
def test_a_process_with_another_ranks_number_or_another_number_of_ranks_is_told_to_all(rank, size, why) -> None:
    hello = {"token": TOKEN, "rank": rank, "size": size}
    with ranks(3, connected=2) as (server, clients):
        with pytest.raises(ConfigError, match=why):
            connect("localhost", server.port, hello)
        assert all(client.wait(lambda client=client: client.abort_reason == why, 2.0) for client in clients)
        assert clients[0].collect("key", 0).keys() == {0}, "nobody is waited for"
    with ranks(3) as clients:
        port = clients[0]._socket.getpeername()[1]
        with pytest.raises(ConfigError, match=why):
            connect("localhost", port, hello)
        assert not any(client.abort_reason for client in clients), "a run that has begun goes on"


def test_a_host_that_is_gone_without_a_word_is_noticed_within_a_minute() -> None:
    with ranks(2, connected=2) as (server, clients):
        ends = [clients[1]._socket, server._links[1].socket]
        for end in ends:
            idle, interval, count = (
                end.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert idle + interval * count <= 60
            # Data that nobody acknowledges counts too: probes are only sent while there is none.
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * (idle + interval * count)


@pytest.mark.parametrize(
    "sent", [b"[" * 4000 + b"\n", b"x" * 5000, b'{"token": 3, "rank": 1}\n', b'{"token": "right", "rank": -1}\n']
)
def test_what_a_stranger_sends_neither_ends_the_hub_nor_fills_its_memory(sent: bytes) -> None:
    with ranks(2, connected=1) as (server, clients):
        with socket.create_connection(("localhost", server.port)) as connection:
            connection.sendall(sent)
            connection.settimeout(5.0)
            assert connection.recv(1) == b"", "the monitor has not closed the connection"
        assert json.dumps(clients[0].collect("key", 1, seconds=0.2)) == '{"0": 1}'


def test_a_hub_of_one_machine_listens_to_no_other() -> None:
    assert (
        MonitorServer(2, TOKEN, lambda statuses: Diagnosis(), lambda rank: False, local=True)._listener.getsockname()[0]
        == "127.0.0.1"
    )


HOSTS = {"localhost": True, "127.0.0.1": True, "::1": True, "10.0.0.1": False, "node1": False}


@pytest.mark.parametrize(("host", "local"), HOSTS.items())
def test_which_address_only_this_machine_reaches(host: str, local: bool) -> None:
    assert serving.is_loopback(host) is serving.is_local(host) is local


def test_a_store_of_one_machine_listens_to_no_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    store = serving.serve("127.0.0.1", port, 1, timedelta(seconds=5))
    store.set("key", "value")
    listening = [
        line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    ]
    assert f"0100007F:{port:04X}" in listening
    assert f"00000000:{port:04X}" not in listening
