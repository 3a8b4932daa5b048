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
from unishard.failures.monitor_client import MonitorClient
from unishard.failures.monitor_server import DIED, ENDED, FOLLOWED, RAISED, MonitorServer
from unishard.failures.verdict import Judgement

TOKEN = "right"


@contextmanager
def ranks(
    size: int,
    connected: int | None = None,
    judge: Any = lambda statuses: Judgement(),
    unreachable: Any = lambda rank: False,
) -> Iterator:
    """Lines of the first ranks to one server."""
    server = MonitorServer(size, TOKEN, judge, unreachable or (lambda rank: False))
    lines = []
    for rank in range(size if connected is None else connected):
        connection = connect("localhost", server.port, {"token": TOKEN, "rank": rank, "size": size})
        assert connection is not None
        lines.append(MonitorClient(connection, rank, size, None))
    try:
        yield lines if connected is None else (server, lines)
    finally:
        for line in lines:
            line._closed = True
            line._socket.close()


def together(lines: list[MonitorClient], *args: Any, **kwargs: Any) -> list[dict[int, Any]]:
    """What each of these ranks gets from the same collection; it gives its rank where no value is passed."""
    answers: list[Any] = [None] * len(lines)

    def collect(index: int) -> None:
        answers[index] = lines[index].collect(args[0], args[1] if len(args) > 1 else lines[index].rank, **kwargs)

    threads = [threading.Thread(target=collect, args=(index,)) for index in range(len(lines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return answers


def die(line: MonitorClient) -> None:
    """End as a killed process does."""
    line._socket.shutdown(socket.SHUT_RDWR)


def test_all_ranks_get_the_values_of_all() -> None:
    with ranks(3) as lines:
        assert together(lines, "key") == [{0: 0, 1: 1, 2: 2}] * 3
        assert together(lines, "other", [1, "a"]) == [{0: [1, "a"], 1: [1, "a"], 2: [1, "a"]}] * 3


def test_a_rank_that_dies_is_known_at_once_and_no_longer_waited_for() -> None:
    with ranks(3) as lines:
        start = time.monotonic()
        threading.Timer(0.2, die, (lines[1],)).start()
        assert together([lines[0], lines[2]], "key") == [{0: 0, 2: 2}] * 2
        assert time.monotonic() - start < 2
        for line in (lines[0], lines[2]):
            assert line.endings[1].how == DIED
            assert line.is_gone(1)
            assert (
                line.cause()
                == "rank 1 is gone: its process ended without an error (killed, for lack of memory, or in C++)"
            )


def test_what_explains_the_end_of_a_run_comes_before_what_follows_from_it() -> None:
    with ranks(4) as lines:
        lines[3].end("has ended its program", ENDED)
        assert lines[0].cause(1.0) == "rank 3 has ended its program"
        lines[1].end("raised RankMismatchError: no", FOLLOWED)
        lines[2].end("raised ValueError: a broken sample", RAISED)
        lines[2].end("has ended its program", ENDED)  # at the end of the process; the first word counts
        assert all(line.wait(lambda line=line: 2 in line.endings, 1.0) for line in lines)
        assert lines[0].cause() == "rank 2 raised ValueError: a broken sample"
        assert [list(line.endings) for line in lines[:3]] == [[3, 1, 2]] * 3, "the same order everywhere"


def test_a_rank_that_comes_later_hears_of_those_that_have_ended() -> None:
    with ranks(3, connected=2) as (server, lines):
        lines[0].end("raised ValueError: no", RAISED)
        die(lines[1])
        assert lines[0].wait(lambda: lines[0].is_gone(1), 2.0)
        connection = connect("localhost", server.port, {"token": TOKEN, "rank": 2, "size": 3})
        assert connection is not None
        late = MonitorClient(connection, 2, 3, None)
        assert late.wait(lambda: late.is_gone(1), 2.0)
        assert str(late.others()[0]) == "rank 0 raised ValueError: no"
        die(late)


def test_the_end_of_rank_0_is_known_although_it_serves() -> None:
    with ranks(2) as lines:
        lines[0].end("raised ValueError: no", RAISED)
        die(lines[1])  # the connection breaks, as at the end of the monitor's process
        assert lines[1].wait(lambda: lines[1].is_gone(0), 2.0)
        assert lines[1].cause() == "rank 0 raised ValueError: no"
        assert lines[1].collect("key", 5) == {1: 5}


def test_a_collection_can_end_without_those_that_are_late_who_get_the_same() -> None:
    with ranks(3) as lines:
        assert together(lines[:2], "key", seconds=0.3) == [{0: 0, 1: 1}] * 2
        assert lines[2].collect("key", 2, seconds=0.3) == {0: 0, 1: 1}


def test_a_value_can_be_given_before_others_ask() -> None:
    with ranks(2) as lines:
        lines[1].give("key", "early")
        time.sleep(0.1)
        assert lines[0].collect("key", "asked", seconds=2.0) == {0: "asked", 1: "early"}


def test_ranks_that_are_waited_for_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with ranks(4, connected=2) as (_, lines), caplog.at_level(logging.WARNING, "unishard"):
        thread = threading.Thread(
            target=together, args=(lines, "key"), kwargs={"what": "to call prepare", "patience": 0.2}, daemon=True
        )
        thread.start()
        time.sleep(2.0)
        assert caplog.messages == ["rank 0 has waited 0 s for ranks 2, 3 to call prepare"]
        for line in lines:
            die(line)


def test_a_rank_that_cannot_connect_is_not_waited_for() -> None:
    with ranks(3, connected=2, unreachable=lambda rank: rank == 2) as (_, lines):
        assert together(lines, "key", patience=0.2) == [{0: 0, 1: 1}] * 2


def test_the_judge_hears_of_ranks_that_all_stand_still_and_is_heard_by_all() -> None:
    asked: list[Any] = []

    def judge(statuses: Any) -> Judgement:
        asked.append(dict(statuses))
        return Judgement("no rank can go on" if statuses[1] == "stuck" else "")

    with ranks(2, judge=judge) as lines:
        lines[0].status("waits")
        lines[1].status("busy")
        lines[1].status(None)
        lines[0].status("waits")
        lines[1].status("stuck")
        assert all(line.wait(lambda line=line: bool(line.verdict), 2.0) for line in lines)
        assert {line.cause() for line in lines} == {"no rank can go on"}
        assert {0: "waits", 1: "busy"} in asked
        assert all(len(statuses) == 2 for statuses in asked)


@pytest.mark.parametrize(
    "hello", [{"token": "wrong", "rank": 1, "size": 2}, {"token": TOKEN, "rank": 2, "size": 2}, {"rank": 1}, []]
)
def test_a_stranger_is_refused(hello: Any) -> None:
    with ranks(2, connected=1) as (server, lines):
        assert connect("localhost", server.port, hello) is None
        with socket.create_connection(("localhost", server.port)) as connection:
            connection.sendall(b"\x00\xff not json\n")
            assert connection.recv(1) == b""
        assert not lines[0].endings
        assert json.dumps(lines[0].collect("key", 1, seconds=0.2)) == '{"0": 1}'


MISPLACED = [
    (0, 3, "two processes were started as rank 0; set another RANK for each, from 0 to 2"),
    (2, 4, "rank 2 was started as one of 4 ranks, and rank 0 as one of 3; set the same WORLD_SIZE for every process"),
]


@pytest.mark.parametrize(("rank", "size", "why"), MISPLACED)
def test_a_process_with_another_ranks_number_or_another_number_of_ranks_is_told_to_all(rank, size, why) -> None:
    hello = {"token": TOKEN, "rank": rank, "size": size}
    with ranks(3, connected=2) as (server, lines):
        with pytest.raises(ConfigError, match=why):
            connect("localhost", server.port, hello)
        assert all(line.wait(lambda line=line: line.verdict == why, 2.0) for line in lines)
        assert lines[0].collect("key", 0).keys() == {0}, "nobody is waited for"
    with ranks(3) as lines:
        port = lines[0]._socket.getpeername()[1]
        with pytest.raises(ConfigError, match=why):
            connect("localhost", port, hello)
        assert not any(line.verdict for line in lines), "a run that has begun goes on"


def test_a_host_that_is_gone_without_a_word_is_noticed_within_a_minute() -> None:
    with ranks(2, connected=2) as (server, lines):
        ends = [lines[1]._socket, server._links[1].socket]
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
    with ranks(2, connected=1) as (server, lines):
        with socket.create_connection(("localhost", server.port)) as connection:
            connection.sendall(sent)
            connection.settimeout(5.0)
            assert connection.recv(1) == b"", "the monitor has not closed the connection"
        assert json.dumps(lines[0].collect("key", 1, seconds=0.2)) == '{"0": 1}'


def test_a_hub_of_one_machine_listens_to_no_other() -> None:
    assert (
        MonitorServer(2, TOKEN, lambda statuses: Judgement(), lambda rank: False, local=True)._listener.getsockname()[0]
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
