"""What the watch makes of a host that waits for its device inside a call of an engine, with events that are
pretended."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch

from unishard.failures import collective_check, watchdog
from unishard.failures.call_log import Call, CallLog
from unishard.failures.deadlocks import BUSY, WAITS
from unishard.failures.device_wait import DeviceWait
from unishard.failures.rank_locations import Location


class Stream:
    """Work before the collectives, and a collective that ends when it is told."""

    def __init__(self, *, reached: bool = True, done: bool = False) -> None:
        self.reached, self.done, self.events = reached, done, 0

    def record_event(self) -> SimpleNamespace:
        self.events += 1
        return SimpleNamespace(query=(lambda: self.reached) if self.events == 1 else lambda: self.done)

    def query(self) -> bool:
        return self.done


@pytest.mark.parametrize(
    ("reached", "done", "holds"),
    [(True, False, True), (False, False, False), (True, True, False)],
    ids=["in a collective", "computes before it", "is through"],
)
def test_only_a_device_between_the_two_is_held_up(reached, done, holds):
    assert DeviceWait(Stream(reached=reached, done=done)).holds() is holds


def test_what_the_host_queues_behind_the_collectives_does_not_hold_it_up():
    stream = Stream(done=True)
    wait = DeviceWait(stream)
    wait.end()
    stream.query = lambda: False  # the next forward runs
    assert wait.ended
    assert not wait.holds()
    stream.done = False
    assert wait.holds()


def test_an_error_on_the_device_is_left_to_the_thread_that_waits():
    def fail() -> bool:
        raise RuntimeError("CUDA error")

    stream = Stream()
    stream.query = fail
    assert DeviceWait(stream).holds() is False


def test_a_call_says_for_how_long_the_host_may_wait_for_the_device(monkeypatch):
    check, device = SimpleNamespace(members=0, active=0, device_wait=None), torch.device("cuda", 1)
    monkeypatch.setattr(DeviceWait, "on", classmethod(lambda cls, asked: asked))
    member = collective_check.Member(check)
    with contextlib.suppress(ValueError), member.reading(device):
        assert check.device_wait == device
        raise ValueError("from the update")
    assert check.device_wait is None
    monkeypatch.setattr(DeviceWait, "on", classmethod(lambda cls, asked: cls(Stream())))
    with member.reading(device):
        assert not check.device_wait.ended
    assert check.device_wait.ended, "the host goes on, and may wait later"
    with member.reading(torch.device("cpu")):
        assert check.device_wait is None


NOW = 100.0
"""Seconds, when the watch looks for the first time."""


class Check:
    """A rank that has made no call for a second, since its call of an update."""

    rank, active, failed, waiting, thread, timeout, world, gloo, limit = 0, 1, "", False, 0, 0.2, None, False, 9.9

    def __init__(self, device_wait: DeviceWait | None) -> None:
        self.device_wait, self.moved, self.told = device_wait, NOW - 1, []
        self.call_log = CallLog()
        self.call_log.record(Call("is in engine.step (update 16)"))
        self.monitor = SimpleNamespace(abort_reason="", port=0, status=self.told.append, ask=lambda: None)

    def give_up(self, why: str) -> None:
        raise AssertionError(why)


@pytest.fixture
def looks(monkeypatch):
    """Lets the watch look at a rank that sits in a call of an engine, until it must have said what it does: what, and
    where."""
    clock = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr(watchdog, "time", clock)
    inside = [True]
    monkeypatch.setattr(watchdog, "where_is", lambda thread: Location("train.py:7 in main", inside[0], None))
    monkeypatch.setattr(watchdog, "position_of", lambda thread: (7,))

    def look(device_wait: DeviceWait | None, *, in_engine: bool = True) -> tuple[str, str]:
        inside[0] = in_engine
        check, own, clock.now = Check(device_wait), watchdog._Watch(), NOW
        own.look(check)
        assert check.told[0].doing == BUSY
        clock.now = NOW + check.timeout / 4 + 0.01
        own.look(check)
        return check.told[-1].doing, check.told[-1].place

    return look


def test_a_rank_whose_device_is_held_up_says_that_it_waits(looks):
    where = "is in engine.step (update 16), waits in torch.distributed at train.py:7 in main"
    assert looks(DeviceWait(Stream())) == (WAITS, where)


@pytest.mark.parametrize(
    ("done", "does"), [(False, WAITS), (True, BUSY)], ids=["in a collective", "computes behind it"]
)
def test_a_host_that_reads_a_loss_after_the_step_says_what_its_device_does(looks, done, does):
    wait = DeviceWait(Stream(done=done))
    wait.end()
    assert looks(wait, in_engine=False)[0] == does


@pytest.mark.parametrize("wait", [None, DeviceWait(Stream(reached=False)), DeviceWait(Stream(done=True))])
def test_a_rank_that_computes_is_waited_for(looks, wait):
    assert looks(wait) == (BUSY, "is in engine.step (update 16) at train.py:7 in main")


@pytest.mark.gpu
def test_on_a_real_device():
    device = torch.device("cuda", torch.cuda.current_device())
    wait = DeviceWait.on(device)
    torch.cuda._sleep(2 * 10**9)  # about a second
    time.sleep(0.1)
    assert wait.holds()
    torch.cuda.synchronize()
    assert not wait.holds()
