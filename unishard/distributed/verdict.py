"""What ranks that disagree, or that all stand still, tell about each other: the text of the error that each of them raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from unishard.distributed.journal import Tail, first_difference, tail_from
from unishard.distributed.rank_locations import describe

__all__ = ["BUSY", "LEFT", "MEETS", "WAITS", "Judge", "Judgement", "different_calls", "status_of"]

MEETS, WAITS, LEFT, BUSY = "meets", "waits", "left", "busy"
"""What a rank that stands still does: it waits for the other ranks before a call; it waits in a collective; it has closed its engines;
or anything else."""


class Judgement(NamedTuple):
    """What the hub makes of ranks that all stand still."""

    verdict: str = ""
    """Why no rank can go on; empty while one might."""
    late: Mapping[int, str] = {}
    """What to log on a rank that has waited for long."""


class Standstill(NamedTuple):
    """A rank that stands still."""

    tail: Tail
    doing: str
    place: str
    """Where it is, in words."""
    inside: bool
    """Whether that is in a call of unishard."""
    seconds: float
    """Since its last call began."""
    patience: float
    """`communication.desync_timeout`."""


def status_of(tail: Tail, doing: str, place: str, *, inside: bool, seconds: float, patience: float) -> Any:
    """A status, as JSON."""
    return Standstill(tail, doing, place, inside, seconds, patience)


def different_calls(tails: Mapping[int, Tail], gone: Mapping[int, str]) -> str:
    """The error of ranks that found that their calls differ, or that a rank is gone.

    Args:
        tails: Of the ranks that have answered.
        gone: What became of the others; an empty text for one that gave no answer.
    """
    number = first_difference(tails)
    at = max(tail.number for tail in tails.values()) if number is None else number
    calls = {rank: call for rank, tail in tails.items() if (call := tail.at(at) or (tail.calls[-1] if tail.calls else None)) is not None}
    places = {rank: call.text for rank, call in calls.items()} | {rank: text for rank, text in gone.items() if text}
    places |= dict.fromkeys(tails.keys() - places.keys(), "has made no call since the last error")
    where = describe(places, [rank for rank, text in gone.items() if not text], _last_common(tails, at))
    advice = ""
    if any(call.unit for call in calls.values()) and number is not None:
        classes = sorted({call.unit.rpartition("(")[2].rstrip(")") for call in calls.values() if call.unit})
        advice = (
            "; all ranks must run the same modules in the same order, except those of the classes in sharding.conditional_modules: "
            f"add {', '.join(classes)} there, or let every rank take the same branch"
        )
    elif number is not None and all(tail.number > number for tail in tails.values()):
        advice = "; they have trained on since, perhaps differently: go back to a checkpoint from before this"
    return f"ranks made different calls and would deadlock: {where}{advice}"


def _last_common(tails: Mapping[int, Tail], at: int) -> str:
    """The last call that all ranks have made, before the one at a number."""
    tail = next(iter(tails.values()))
    now = tail.at(at)
    for number in range(at - 1, tail.first - 1, -1):
        call = tail.at(number)
        if call is not None and (now is None or call.place != now.place):
            return call.place
    return "is before its first call"


class Judge:
    """Judges the ranks that live, once all of them stand still. Runs on rank 0, in the hub's thread."""

    def __init__(self) -> None:
        self._warned: set[tuple[int, int]] = set()

    def __call__(self, sent: Mapping[int, Any]) -> Judgement:
        """Decide whether the ranks wait for each other, and which of them are late.

        Args:
            sent: The status of every rank that lives.
        """
        statuses = {rank: Standstill(tail_from(tail), *rest) for rank, (tail, *rest) in sent.items()}
        tails = {rank: status.tail for rank, status in statuses.items()}
        if first_difference(tails) is not None:
            return Judgement(different_calls(tails, {}))
        where = describe({rank: status.place for rank, status in statuses.items()}, (), "")
        if _is_deadlock(statuses):
            return Judgement(f"ranks made different calls and would deadlock: {where}")
        waiting = sorted(rank for rank, status in statuses.items() if status.doing == MEETS and status.seconds >= status.patience)
        if waiting and (asked := (statuses[waiting[0]].tail.epoch, statuses[waiting[0]].tail.number)) not in self._warned:
            self._warned.add(asked)
            return Judgement(late={waiting[0]: f"has waited {statuses[waiting[0]].seconds:.0f} s for other ranks: {where}"})
        return Judgement()


def _is_deadlock(statuses: Mapping[int, Standstill]) -> bool:
    """Whether no rank computes, and one waits for a call that another will never make."""
    if any(status.doing == BUSY or status.seconds < status.patience / 2 for status in statuses.values()):
        return False
    waiting = [status for status in statuses.values() if status.doing == MEETS or (status.doing == WAITS and status.inside)]
    return any(_never_comes(other, each) for other in statuses.values() for each in waiting)


def _never_comes(other: Standstill, waiting: Standstill) -> bool:
    """Whether a rank that stands still will not make the call in which another one waits."""
    if other.doing == LEFT:
        return other.tail.number > waiting.tail.number and waiting.seconds >= waiting.patience
    # A rank that is through with a call may wait outside until the others are through with it too.
    return other.doing == WAITS and not other.inside and (waiting.doing == MEETS or waiting.tail.number > other.tail.number)
