"""The calls that a rank has made, in order: a running hash to compare with other ranks, and the last calls to name
where they differ.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

_KEPT = 256
"""Calls that a rank can still name."""


class Call(NamedTuple):
    """A call, or a module that a forward has entered."""

    place: str = ""
    """`is in engine.forward (update 3, micro-batch 1 of 2)`; `CallLog` adds that of a module."""
    unit: str = ""
    """`layers.0 (LlamaDecoderLayer)` for a module; empty for a call."""
    skipped: str = ""
    """`heads.1 (Linear)`: modules and parameters that have no gradient on this rank."""
    order: str = ""
    """A hash of the order in which gradients came, where they are added up in that order."""
    equal_values: str = ""
    """A JSON dict of what the update uses and must be the same on all ranks, as text by name."""
    error: str = ""
    """`ValueError: a broken sample (train.py:31 in main)`: what has made this rank end its part in the run. Not
    compared."""

    @property
    def text(self) -> str:
        """The call in words."""
        place = f"{self.place}, without gradients for {self.skipped}" if self.skipped else self.place
        return f"enters {self.unit} and {place}" if self.unit else place


class RecentCalls(NamedTuple):
    """The last calls of a rank."""

    epoch: int
    """Counts restarts: calls of different epochs cannot be compared."""
    number: int
    """Number of the last call."""
    calls: tuple[Call, ...]
    """The last call is the last one here."""

    def at(self, number: int) -> Call | None:
        """The call with a number, if it is still known."""
        index = len(self.calls) - 1 - (self.number - number)
        return self.calls[index] if 0 <= index < len(self.calls) else None

    @property
    def first(self) -> int:
        """Number of the first call that is still known."""
        return self.number - len(self.calls) + 1


class CallLog:
    """The calls of this rank. Costs about a microsecond a call."""

    def __init__(self) -> None:
        self.epoch = self.number = self.state = 0
        """`state` is the hash of all calls since the last restart."""
        self._calls: deque[Call] = deque(maxlen=_KEPT)
        self.last = self.place = "is before its first call"
        """The last call but one, and the last one; modules do not count."""

    def record(self, call: Call) -> None:
        """Add a call, or a module that the current call has entered."""
        if call.unit:
            call = Call(self.place, call.unit)
        else:
            self.last, self.place = self.place, call.place
        self.state = zlib.crc32(
            f"{call.unit or call.place}{call.skipped}{call.order}{call.equal_values}\n".encode(), self.state
        )
        self._calls.append(call)
        self.number += 1

    def restart(self, epoch: int) -> None:
        """Forget all calls, after ranks have made different ones and have raised an error for it."""
        self.epoch, self.number, self.state = epoch, 0, zlib.crc32(b"%d" % epoch)
        self._calls.clear()

    def tail(self) -> RecentCalls:
        """The last calls. Any thread may ask."""
        while True:
            epoch, number, calls = self.epoch, self.number, tuple(self._calls.copy())
            if (epoch, number) == (self.epoch, self.number):  # else the rank has made a call in between
                return RecentCalls(epoch, number, calls)

    def now(self) -> str:
        """The last call, and the module that it has entered last."""
        tail = self.tail()
        unit = tail.calls[-1].unit if tail.calls else ""
        return f"{self.place}{', module ' if unit else ''}{unit}"


def tail_from(value: Any) -> RecentCalls:
    """A tail that was sent as JSON."""
    epoch, number, calls = value
    return RecentCalls(epoch, number, tuple(Call(*call) for call in calls))


def first_difference(tails: Mapping[int, RecentCalls]) -> int | None:
    """Number of the first call in which two ranks differ; None if all calls that two ranks know are the same.

    Args:
        tails: By rank.
    """
    epoch = max((tail.epoch for tail in tails.values()), default=0)
    known = [tail for tail in tails.values() if tail.epoch == epoch and tail.calls]
    if len(known) < 2:
        return None
    for number in range(min(tail.first for tail in known), max(tail.number for tail in known) + 1):
        if len({call._replace(error="") for tail in known if (call := tail.at(number)) is not None}) > 1:
            return number
    return None
