"""What the monitor makes of ranks that stand still."""

from __future__ import annotations

import json
from typing import Any

import pytest

from unishard.failures.call_log import Call, CallLog, RecentCalls
from unishard.failures.deadlocks import (
    BUSY,
    LEFT,
    MEETS,
    WAITS,
    DeadlockDetector,
    Diagnosis,
    Standstill,
    different_calls,
)
from unishard.failures.rank_locations import describe

FORWARD, SAVE = "is in engine.forward (update 13)", "is in engine.save (update 13)"


def tail(*places: str, units: tuple[str, ...] = ()) -> RecentCalls:
    call_log = CallLog()
    for place in places:
        call_log.record(Call(place))
    for unit in units:
        call_log.record(Call(unit=unit))
    return call_log.tail()


def status(
    doing: str,
    *places: str,
    inside: bool = True,
    seconds: float = 12.0,
    place: str = "",
    group: tuple[int, ...] = (),
    threads: bool = False,
    quiet: float = 1000.0,
    gloo: bool = True,
    age: float = 0.0,
    limit: float = 1800.0,
) -> tuple[float, Any]:
    """As it comes to the monitor."""
    where = place or places[-1]
    standing = Standstill(tail(*places), doing, where, inside, seconds, 10.0, group, threads, quiet, gloo, limit)
    return age, json.loads(json.dumps(standing))


def test_a_difference_of_before_is_told_with_what_to_do() -> None:
    verdict = DeadlockDetector(2)({0: status(BUSY, "a", SAVE, "b"), 1: status(BUSY, "a", FORWARD, "b")}).abort_reason
    assert (
        f"rank 0 {SAVE}; rank 1 {FORWARD}; they have trained on since, perhaps differently: go back to a checkpoint"
        in verdict
    )


@pytest.mark.parametrize(
    ("ranks", "deadlock"),
    [
        ([(MEETS, 2, True), (WAITS, 1, False)], True),  # one is in save, the other in a barrier of its own
        ([(WAITS, 2, True), (WAITS, 1, False)], True),  # one is in a forward that the other will not reach
        ([(WAITS, 2, True), (LEFT, 3, False)], True),  # the other has closed its engine after this call
        ([(WAITS, 2, True), (WAITS, 2, False)], False),  # the other is through with it, and waits for the first outside
        ([(MEETS, 2, True), (LEFT, 1, False)], False),  # the other may come: it has only closed an engine before
        ([(MEETS, 2, True), (BUSY, 1, False)], False),  # it reads data
        ([(WAITS, 2, True), (WAITS, 2, True)], False),  # a slow network
        ([(MEETS, 3, True), (WAITS, 2, True)], False),  # what the first has sent may be on its way
        ([(MEETS, 3, True), (WAITS, 2, True), (BUSY, 2, True)], False),  # the third may be what the second waits for
        ([(WAITS, 3, True), (WAITS, 2, True)], False),  # perhaps a slow network
        ([(WAITS, 1, False), (WAITS, 1, False)], False),  # a collective of the caller's
        ([(MEETS, 2, True), (WAITS, 1, False), (BUSY, 1, False)], False),  # the third may be what the second waits for
    ],
)
def test_ranks_that_wait_for_each_other_in_vain(ranks: list[tuple[str, int, bool]], deadlock: bool) -> None:
    calls = ("a", "b", "c")
    statuses = {
        rank: status(doing, *calls[:number], inside=inside) for rank, (doing, number, inside) in enumerate(ranks)
    }
    assert bool(DeadlockDetector(len(ranks))(statuses).abort_reason) is deadlock
    fresh = {rank: (age, [*each[:4], 1.0, *each[5:]]) for rank, (age, each) in statuses.items()}
    assert DeadlockDetector(len(ranks))(fresh).abort_reason == "", "they have just come there"
    moving = {rank: (age, [*each[:8], 1.0, *each[9:]]) for rank, (age, each) in statuses.items()}
    assert DeadlockDetector(len(ranks))(moving).abort_reason == "", "a transfer"


@pytest.mark.parametrize(
    ("outside", "deadlock"), [((), True), ((0, 1), True), ((0, 2), False)], ids=["all", "both", "others"]
)
def test_ranks_wait_for_each_other_only_in_a_collective_that_both_join(
    outside: tuple[int, ...], deadlock: bool
) -> None:
    waits = {rank: status(WAITS, "a", inside=False, group=outside) for rank in (0, 2)}
    assert bool(DeadlockDetector(3)(waits | {1: status(MEETS, "a", "b")}).abort_reason) is deadlock
    assert (
        bool(DeadlockDetector(3)(waits | {1: status(WAITS, "a", "b", group=outside and (0, 1))}).abort_reason)
        is deadlock
    )


def test_a_rank_whose_own_threads_may_join_what_another_one_waits_in_is_waited_for() -> None:
    waits = status(WAITS, "a", inside=False)
    assert DeadlockDetector(2)({0: waits, 1: status(MEETS, "a", "b")}).abort_reason
    assert not DeadlockDetector(2)({0: waits, 1: status(MEETS, "a", "b", threads=True)}).abort_reason


@pytest.mark.parametrize("doing", [MEETS, WAITS])
def test_a_collective_of_another_call_is_waited_for_longer_than_one_that_is_slow(doing: str) -> None:
    def verdict(first: int, second: int) -> str:
        calls = ("a", "is in engine.backward (update 13)", SAVE)
        statuses = {
            rank: status(does, *calls[:number], seconds=61.0)
            for rank, (does, number) in enumerate([(doing, first), (WAITS, second)])
        }
        return DeadlockDetector(2)(statuses).abort_reason

    assert (
        verdict(3, 2)
        == f"ranks made different calls and would deadlock: rank 0 {SAVE}; rank 1 is in engine.backward (update 13)"
    )
    assert verdict(2, 2).startswith("ranks wait for each other, and no data is on its way between them: ")


def found(*statuses: Any) -> str:
    return DeadlockDetector(2)(dict(enumerate(statuses))).abort_reason


def test_ranks_that_all_wait_while_nothing_moves_are_told_after_six_timeouts() -> None:
    def two(other: str = WAITS, **said: Any) -> str:
        options = {"inside": False, "seconds": 61.0} | said
        waits = status(WAITS, "a", inside=False, seconds=61.0, place="waits in torch.distributed at a.py:3 in f")
        return found(waits, status(other, "a", place="waits in torch.distributed at b.py:4 in g", **options))

    assert two() == (
        "ranks wait for each other, and no data is on its way between them: rank 0 waits in torch.distributed at "
        "a.py:3 in f; rank 1 waits in torch.distributed at b.py:4 in g"
    )
    assert two(seconds=59.0) == "", "it has come later"
    assert two(quiet=59.0) == "", "its data was on its way"
    assert two(other=BUSY) == two(other=LEFT) == "", "it may still come"
    assert two(threads=True) == "", "its thread may send"
    assert two(threads=True, inside=True), "no thread of the user's makes calls of an engine"
    assert two(gloo=False) == "", "its device may compute"
    last = {1: status(WAITS, "a", seconds=61.0)}
    assert DeadlockDetector(2)(last).abort_reason == "", "the other one has ended, of which it is told"


def test_only_ranks_that_are_known_to_wait_at_one_time_wait_for_each_other() -> None:
    waits, meets = status(WAITS, "a", inside=False, seconds=6.0), status(MEETS, "a", "b", seconds=6.0)
    assert found(waits, meets)
    assert found((2.0, waits[1]), meets) == "", "perhaps it has not waited for two seconds, and its process is busy"
    assert found((2.0, status(WAITS, "a", inside=False, seconds=9.0)[1]), status(MEETS, "a", "b", seconds=8.0))


def test_the_first_rank_that_waits_is_told_once_where_the_late_ones_are() -> None:
    detect = DeadlockDetector(3)
    late = status(BUSY, "a", inside=False, place="is at train.py:33 in load, outside unishard")
    statuses = {0: late, 1: status(MEETS, "a", SAVE), 2: status(MEETS, "a", SAVE)}
    said = (
        "has waited 12 s for other ranks: rank 0 is at train.py:33 in load, outside unishard; ranks 1, 2 "
        f"{SAVE.replace('is', 'are', 1)}"
    )
    assert detect(statuses) == Diagnosis(late={1: said})
    assert detect(statuses) == Diagnosis()


def test_a_rank_that_is_later_than_the_timeout_is_named_first() -> None:
    def ends(waits: float, **said: Any) -> str:
        busy = status(BUSY, "a", inside=False, place="is at train.py:33 in load, outside unishard")
        return found(status(MEETS, "a", FORWARD, seconds=waits, limit=60.0, **said), busy)

    assert ends(50.0) == (
        "rank 1 is at train.py:33 in load, outside unishard, later than communication.timeout allows (60 s); "
        f"rank 0 {FORWARD}"
    )
    assert ends(49.0) == ""
    assert ends(50.0, inside=False) == "", "in a group of the script's own, which has its own timeout"


def test_late_ranks_are_told_to_one_that_waits_in_a_collective_too() -> None:
    late = status(BUSY, "a", place="is in engine.forward (update 13) at model.py:7 in forward")
    told = DeadlockDetector(2)({0: status(WAITS, "a"), 1: late}).late
    assert told == {
        0: "has waited 12 s for other ranks: rank 0 a; rank 1 is in engine.forward (update 13) at model.py:7 in forward"
    }
    assert DeadlockDetector(2)({rank: status(WAITS, "a") for rank in (0, 1)}) == Diagnosis(), "a slow network"


def test_a_rank_that_is_gone_is_told_with_its_error_or_with_its_last_call() -> None:
    tails = {0: tail("is in engine.step (update 12)", FORWARD)}
    assert different_calls(tails, {1: ""}).endswith(
        f"rank 0 {FORWARD}; rank 1 is gone or gave no answer, last seen in engine.step (update 12)"
    )
    assert different_calls(tails, {1: "raised ValueError: no"}).endswith(
        f"rank 0 {FORWARD}; rank 1 raised ValueError: no"
    )


def test_ranks_at_one_place_are_told_in_the_plural() -> None:
    for one, several in (
        ("is in engine.step, waits in torch.distributed at a.py:3 in f", "are in engine.step, wait in"),
        ("enters a (Linear) and is in engine.forward", "enter a (Linear) and are in engine.forward"),
        ("raised ValueError: x is no y and is in engine.step", "raised ValueError: x is no y and are in engine.step"),
        ("has closed the engine", "have closed the engine"),
    ):
        assert describe({0: one, 1: one}, (), "").startswith(f"ranks 0, 1 {several}")
        assert describe({0: one}, (), "") == f"rank 0 {one}"
