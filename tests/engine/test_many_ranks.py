"""What grows with the number of ranks, counted with fake process groups and a server without connections."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from unishard.distributed import agreement, descriptors
from unishard.failures.deadlocks import Diagnosis
from unishard.failures.monitor_server import MonitorServer, _Link


@contextmanager
def ranks(world: int) -> Iterator[None]:
    """This process as one of many ranks, whose collectives return at once."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 4096])
def test_ranks_that_agree_send_64_bytes_in_one_collective(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, int]] = []

    def recorded(name: str) -> Callable[..., Any]:
        def send(tensor: torch.Tensor, *rest: Any, **more: Any) -> Any:
            sent.append((name, tensor.nbytes))
            return SimpleNamespace(wait=lambda: None)

        return send

    for name in (
        "all_reduce",
        "all_gather",
        "broadcast",
        "gather",
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
    ):
        monkeypatch.setattr(dist, name, recorded(name))
    with ranks(world):
        agreement.agree({"config": "x" * 50_000}, "configs")
    assert sent == [("all_reduce", 64)]


def test_a_difference_names_the_ranks_that_differ_from_rank_0() -> None:
    others: list[dict[str, str]] = [{} for _ in range(1000)]
    others[700] = {"lr": "0.2", "own": "1"}
    assert agreement._described({"seed": "1", "lr": "0.1"}, others).splitlines() == [
        "lr: rank 0 has 0.1, rank 700 has 0.2",
        "own: rank 0 has nothing, rank 700 has 1",
    ]
    for rank in range(1, 1000):
        others[rank] = {"lr": str(rank)}
    assert agreement._described({"lr": "0.1"}, others).endswith("rank 7 has 7 and 992 more ranks have other values")


def test_few_ranks_are_all_named() -> None:
    assert (
        agreement._described({"lr": "0.1"}, [{}, {"lr": "0.2"}, {}])
        == "lr: rank 0 has 0.1, rank 1 has 0.2, rank 2 has 0.1"
    )


class Counting:
    """A connection that counts what is sent over it."""

    def __init__(self) -> None:
        self.bytes = 0

    def sendall(self, data: bytes) -> None:
        self.bytes += len(data)


class Played:
    """A server to which so many ranks are connected, without sockets."""

    def __init__(self, world: int, detect: Any = lambda statuses: Diagnosis()) -> None:
        self.server = MonitorServer(world, "token", detect, lambda rank: False, local=True)
        self.links = []
        for rank in range(world):
            link = _Link(Counting())  # type: ignore[arg-type]
            self.links.append(link)
            self.server._handle(link, {"token": "token", "rank": rank, "size": world})

    def collect(self, key: str, value: Any = "") -> int:
        """Bytes that the monitor sends if every rank gives a value."""
        before = sum(link.socket.bytes for link in self.links)
        for link in self.links:
            said = {"kind": "collect", "key": key, "value": value, "purpose": "", "seconds": None, "patience": None}
            self.server._handle(link, said)
        return sum(link.socket.bytes for link in self.links) - before


def test_what_all_ranks_say_alike_is_one_short_line_to_each() -> None:
    few, many = Played(8).collect("arrived") / 8, Played(4096).collect("arrived") / 4096
    assert many <= few + 8


def test_the_detector_hears_of_all_ranks_once_and_not_at_each_status() -> None:
    asked: list[int] = []

    def detect(statuses: Any) -> Diagnosis:
        asked.append(len(statuses))
        return Diagnosis()

    played = Played(1024, detect)
    for _ in range(3):
        for link in played.links:
            played.server._handle(link, {"kind": "status", "status": "waits"})
    assert asked[0] == 1024
    assert len(asked) <= 8, "a status of each rank must not be an examination of all"


def test_a_large_run_has_room_for_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 100_000))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limit: limits.append(limit))
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    descriptors.make_room(64)
    assert limits == []
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    descriptors.make_room(2048)
    assert limits == [(3 * 2047 + 512, 100_000)]
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"
    descriptors.make_room(100_000)
    assert limits[-1] == (100_000, 100_000)
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
