"""Finds ranks that wait for each other, and writes the error of ranks that make different calls, which names where each
rank is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from unishard.failures.call_log import Call, RecentCalls, first_difference, tail_from
from unishard.failures.rank_locations import describe

MEETS, WAITS, LEFT, BUSY = "meets", "waits", "left", "busy"
"""What a rank that stands still does: it waits for the other ranks before a call; it waits in a collective; it has
closed its engines; or anything else."""

_DEADLOCK = "ranks made different calls and would deadlock"
_STILL = "ranks wait for each other, and no data is on its way between them"
_MIXED = "ranks have gradients of different parameters, which would be added up"
_EXCEPT = "except those of the classes in sharding.conditional_modules"
_BRANCH = "or let every rank take the same branch"
_OWN_MODULE = f"{_EXCEPT}: put such parameters into a module with a forward, and add its class"
_UNEQUAL = "learning rates, other options or weights differ between ranks in"
_UNWRITTEN = "not written by the script"
_ALIKE = "write the same values on every rank: the ranks would train parts of different models"
_NAMED = 4
"""Values named that differ."""
_SLOWEST = 6
"""Timeouts without a sign of life of a collective that all ranks may have joined."""


class Diagnosis(NamedTuple):
    """What `DeadlockDetector` finds about ranks that all stand still."""

    abort_reason: str = ""
    """Why no rank can go on; empty while one might."""
    late: Mapping[int, str] = {}
    """What to log on a rank that has waited for long."""


class Standstill(NamedTuple):
    """A rank that stands still."""

    tail: RecentCalls
    doing: str
    place: str
    """Where it is, in words."""
    inside: bool
    """Whether that is in a call of unishard."""
    seconds: float
    """Since it has begun to wait, or since its last call began."""
    patience: float
    """`communication.desync_timeout`."""
    group: Sequence[int] = ()
    """The ranks that join the collective in which it waits; empty for all."""
    threads: bool = False
    """Whether other threads of it run code of the user."""
    quiet: float = 0.0
    """Seconds for which no data has been on its way from or to it, see `Traffic`."""
    gloo: bool = False
    """Whether it waits for other ranks only: no collective of its process group waits for a device."""
    limit: float = math.inf
    """Seconds that it waits for a late rank, at most."""
    age: float = 0.0
    """Seconds since it has said so."""

    @property
    def still(self) -> float:
        """Seconds for which it has waited while no data was on its way."""
        return min(self.seconds, self.quiet)

    def waits_for(self, rank: int) -> bool:
        """Whether a rank must join the collective in which this one waits."""
        return not self.group or rank in self.group


def different_calls(tails: Mapping[int, RecentCalls], gone: Mapping[int, str]) -> str:
    """The error of ranks that found that their calls differ, or that a rank is gone.

    Args:
        tails: Of the ranks that have answered.
        gone: What became of the others; an empty text for one that gave no answer.
    """
    number = first_difference(tails)
    at = max(tail.number for tail in tails.values()) if number is None else number
    calls = {
        rank: call
        for rank, tail in tails.items()
        if (call := tail.at(at) or (tail.calls[-1] if tail.calls else None)) is not None
    }
    places = {rank: call.text for rank, call in calls.items()} | {rank: text for rank, text in gone.items() if text}
    places |= dict.fromkeys(tails.keys() - places.keys(), "has made no call since the last error")
    silent = [rank for rank, text in gone.items() if not text]
    if raised := _raised(tails, at):
        return _because(raised, places, silent, _last_common(tails, at))
    where = describe(places, silent, _last_common(tails, at))
    if number is not None and len({call._replace(equal_values="", error="") for call in calls.values()}) == 1:
        return _unequal(calls)
    problem, advice = _problem(calls.values()) if number is not None else (_DEADLOCK, "")
    if not advice and number is not None and all(tail.number > number for tail in tails.values()):
        advice = "; they have trained on since, perhaps differently: go back to a checkpoint from before this"
    return f"{problem}: {where}{advice}"


def _unequal(calls: Mapping[int, Call]) -> str:
    """Name the values that differ between ranks which make the same call."""
    by_rank = {rank: json.loads(call.equal_values or "{}") for rank, call in calls.items()}
    names = [
        name
        for name in dict.fromkeys(chain(*by_rank.values()))
        if len({values.get(name) for values in by_rank.values()}) > 1
    ]
    places = {
        rank: f"has {', '.join(f'{name} {values.get(name, _UNWRITTEN)}' for name in names[:_NAMED])}"
        for rank, values in by_rank.items()
    }
    more = f"; {len(names) - _NAMED} other values differ too" if len(names) > _NAMED else ""
    place = next(iter(calls.values())).place.removeprefix("is in ")
    return f"{_UNEQUAL} {place}: {describe(places, (), '')}{more}; {_ALIKE}"


def _raised(tails: Mapping[int, RecentCalls], at: int) -> dict[int, str]:
    """The errors with which ranks have left, in a call of a number or after it."""
    by_rank = {
        rank: [call.error for call in tail.calls[max(0, at - tail.first) :] if call.error]
        for rank, tail in tails.items()
    }
    return {rank: errors[0] for rank, errors in by_rank.items() if errors}


def _because(raised: Mapping[int, str], places: Mapping[int, str], silent: Collection[int], last: str) -> str:
    """Name the ranks that have left with an error first, since their errors cause those of the others."""
    first = describe({rank: f"raised {text} and {places[rank]}" for rank, text in raised.items()}, (), "")
    others = describe({rank: place for rank, place in places.items() if rank not in raised}, silent, last)
    return f"{first}; {others}" if others else first


def _problem(calls: Collection[Call]) -> tuple[str, str]:
    """What is wrong with calls that differ, and what to do where that is known."""
    if any(call.unit for call in calls):
        classes = sorted({call.unit.rpartition("(")[2].rstrip(")") for call in calls if call.unit})
        return (
            _DEADLOCK,
            f"; all ranks must run the same modules in the same order, {_EXCEPT}: add {', '.join(classes)} there, "
            f"{_BRANCH}",
        )
    if len({call.place for call in calls}) > 1:
        return _DEADLOCK, ""
    if len({call.skipped for call in calls}) > 1:
        classes = sorted({name for call in calls for name in re.findall(r"\((\w+)\)", call.skipped)})
        advice = f"{_EXCEPT}: add {', '.join(classes)} there, {_BRANCH}" if classes else _OWN_MODULE
        return _MIXED, f"; all ranks must use the same parameters, {advice}"
    if len({call.order for call in calls}) > 1:
        return (
            _MIXED,
            ", after gradients that came in another order on each rank; all ranks must run the same modules in the "
            f"same order, {_EXCEPT}",
        )
    return _DEADLOCK, ""


def _last_common(tails: Mapping[int, RecentCalls], at: int) -> str:
    """The last call that all ranks have made, before the one at a number."""
    tail = next(iter(tails.values()))
    now = tail.at(at)
    for number in range(at - 1, tail.first - 1, -1):
        call = tail.at(number)
        if call is not None and (now is None or call.place != now.place):
            return call.place
    return "is before its first call"


class DeadlockDetector:
    """Looks for a deadlock once all living ranks stand still. Runs on rank 0, in the monitor's thread."""

    def __init__(self, size: int) -> None:
        """Detect deadlocks of so many ranks."""
        self._size = size
        self._warned: set[tuple[int, int]] = set()

    def __call__(self, sent: Mapping[int, tuple[float, Any]]) -> Diagnosis:
        """Decide whether the ranks wait for each other, and which of them are late.

        Args:
            sent: Of every rank that lives, the seconds since it has sent its status, and that.
        """
        statuses = {
            rank: Standstill(tail_from(tail), *rest)._replace(age=age) for rank, (age, (tail, *rest)) in sent.items()
        }
        tails = {rank: status.tail for rank, status in statuses.items()}
        if first_difference(tails) is not None:
            return Diagnosis(different_calls(tails, {}))
        places = {rank: status.place for rank, status in statuses.items()}
        where = describe(places, (), "")
        if problem := _deadlock(statuses, self._size):
            if raised := _raised(tails, min(tail.number for tail in tails.values())):
                return Diagnosis(_because(raised, places, (), ""))
            return Diagnosis(f"{problem}: {where}")
        if late := _too_late(statuses):
            return Diagnosis(late)
        waiting = [
            rank
            for rank, status in statuses.items()
            if status.doing in (MEETS, WAITS) and status.seconds >= status.patience
        ]
        if not waiting or all(status.doing == WAITS for status in statuses.values()):
            return Diagnosis()
        first = min(waiting)
        asked = (tails[first].epoch, tails[first].number)
        if asked in self._warned:
            return Diagnosis()
        self._warned.add(asked)
        return Diagnosis(late={first: f"has waited {statuses[first].seconds:.0f} s for other ranks: {where}"})


def _too_late(statuses: Mapping[int, Standstill]) -> str:
    """The error of ranks that have waited as long as they may, in a call of the engine; empty if none has.

    It comes just before the timeout of torch, which names nobody.
    """
    waiting = [status for status in statuses.values() if status.inside and status.doing in (MEETS, WAITS)]
    late = {rank: status.place for rank, status in statuses.items() if status.doing == BUSY}
    if not late or not any(
        status.seconds + status.age >= max(status.limit - status.patience, status.limit / 2) for status in waiting
    ):
        return ""
    others = {rank: status.place for rank, status in statuses.items() if rank not in late}
    return (
        f"{describe(late, (), '')}, later than communication.timeout allows ({waiting[0].limit:.0f} s); "
        f"{describe(others, (), '')}"
    )


def _deadlock(statuses: Mapping[int, Standstill], size: int) -> str:
    """What is wrong if no rank can go on; empty if one might.

    Where all ranks wait at one moment at which no data is on its way, all wait forever. A rank that is late computes; a
    transfer that is slow moves data. Where a rank has ended, the others are told of that instead.
    """
    standing = statuses.values()
    patience = max(status.patience for status in standing)
    # Since when the last one waits, until when the first one was known to.
    together = min(status.age + status.still for status in standing) - max(status.age for status in standing)
    if together < patience / 2 or any(status.doing == BUSY for status in standing):
        return ""
    waiting = {
        rank: status
        for rank, status in statuses.items()
        if status.doing == MEETS or (status.doing == WAITS and status.inside)
    }
    if any(
        _never_comes(other, status)
        for rank, status in waiting.items()
        for another, other in statuses.items()
        if status.waits_for(another) and (other.doing != WAITS or other.waits_for(rank))
    ):
        return _DEADLOCK
    on_ranks = len(standing) == size and all(
        status.doing != LEFT and status.gloo and (status.inside or not status.threads) for status in standing
    )
    return _STILL if on_ranks and together >= _SLOWEST * patience else ""


def _never_comes(other: Standstill, waiting: Standstill) -> bool:
    """Whether a rank that stands still will not make the call in which another one waits."""
    if other.doing == LEFT:
        return other.tail.number > waiting.tail.number and waiting.still >= waiting.patience
    if other.doing == WAITS and other.inside:
        # It waits in a collective of an engine, and the first one has left it out, or is behind, or ahead and also
        # waits. Or the first one is through with it, and what it has sent is still on its way.
        still = min(other.still, waiting.still)
        return still >= _SLOWEST * waiting.patience and other.tail.number != waiting.tail.number
    # A rank that is through with a call may wait outside until the others are through with it too. A thread of the
    # user's may join what it waits in.
    through = waiting.doing == MEETS or waiting.tail.number > other.tail.number
    return other.doing == WAITS and through and not waiting.threads
