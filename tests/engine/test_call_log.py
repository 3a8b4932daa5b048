"""The calls of a rank: their running hash, and where those of two ranks differ."""

from __future__ import annotations

import json

from unishard.failures.call_log import Call, CallLog, first_difference, tail_from


def call_log(*places: str) -> CallLog:
    made = CallLog()
    for place in places:
        made.record(Call(place))
    return made


def test_the_hash_is_of_all_calls_in_their_order() -> None:
    assert call_log("a", "b").state == call_log("a", "b").state
    assert len({call_log(*calls).state for calls in (["a", "b"], ["b", "a"], ["a"], ["ab"], [])}) == 5


def test_the_first_call_that_differs_is_found_among_later_ones() -> None:
    tails = {
        0: call_log("a", "b", "c", "x").tail(),
        1: call_log("a", "b", "d", "x").tail(),
        2: call_log("a", "b").tail(),
    }
    assert first_difference(tails) == 3
    assert [tail.at(3) for tail in tails.values()] == [Call("c"), Call("d"), None]


def test_a_rank_that_is_behind_does_not_differ() -> None:
    assert first_difference({0: call_log("a", "b", "c").tail(), 1: call_log("a").tail(), 2: call_log().tail()}) is None


def test_modules_count_too() -> None:
    one, other = call_log("is in engine.forward"), call_log("is in engine.forward")
    one.record(Call(unit="left (Expert)"))
    other.record(Call(unit="right (Expert)"))
    assert one.state != other.state
    assert first_difference({0: one.tail(), 1: other.tail()}) == 2
    assert one.tail().at(2).text == "enters left (Expert) and is in engine.forward"
    assert one.last == "is before its first call", "modules are no calls"


def test_after_an_error_the_ranks_start_anew() -> None:
    one, other = call_log("a", "b"), call_log("a", "c", "d")
    for each in (one, other):
        each.restart(7)
        each.record(Call("e"))
    assert one.state == other.state
    assert first_difference({0: one.tail(), 1: other.tail()}) is None
    assert first_difference({0: one.tail(), 1: call_log("x").tail()}) is None, "calls of before are not compared"


def test_only_the_last_calls_are_kept_and_they_travel_as_json() -> None:
    tail = call_log(*map(str, range(1000))).tail()
    assert tail.number == 1000
    assert tail.at(1000) == Call("999")
    assert tail.at(tail.first - 1) is None
    assert tail_from(json.loads(json.dumps(tail))) == tail
