"""The calls that a rank has made, in order: a running hash to compare with other ranks, and the last calls to name
where they differ.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unishard.distributed.process_group import host_group

_KEPT = 256
"""Calls that a rank can still name."""


class Call(NamedTuple):
    """A call, or a module that a forward has entered."""

    place: str
    """`is in engine.forward (update 3, micro-batch 1 of 2)`."""
    unit: str = ""
    """`layers.0 (LlamaDecoderLayer)` for a module; empty for a call."""
    skipped: str = ""
    """`heads.1 (Linear)`: modules and parameters that have no gradient on this rank."""
    order: str = ""
    """A hash of the order in which gradients came, where they are added up in that order."""
    held: str = ""
    """A JSON dict of what the update uses and must be the same on all ranks, as text by name; see `EqualValues`."""
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
        self.unit = ""
        """The last module that a forward has entered."""

    def record(self, place: str, skipped: str = "", order: str = "", held: str = "", error: str = "") -> None:
        """Add a call; the arguments are those of `Call`."""
        self.last, self.place = self.place, place
        self._add(Call(place, "", skipped, order, held, error))

    def record_unit(self, unit: str) -> None:
        """Add a module that the current call has entered."""
        self.unit = unit
        self._add(Call(self.place, unit))

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

    def _add(self, call: Call) -> None:
        self.state = zlib.crc32(
            f"{call.unit or call.place}{call.skipped}{call.order}{call.held}\n".encode(), self.state
        )
        self._calls.append(call)
        self.number += 1


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


# The exchange of digests among all ranks, in a few rounds over gloo, even with NCCL: nothing in it waits for a device.
# The main thread's collectives in that group have other tags than what is sent here.

_RADIX = 8
"""Up to this many ranks exchange digests in one round; more ranks need log(ranks) rounds."""
_ABSENT = 2**40
"""A digest that no call has: a rank that receives it raises."""


class _Sent(NamedTuple):
    """A digest that this rank has sent without waiting for the others' digests."""

    number: int
    digest: int
    sending: list[tuple[Any, Tensor]]
    receiving: list[tuple[Any, Tensor]]


class DigestExchange:
    """One rank's part of it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._group = host_group()
        self._rounds = list(_rounds(size))
        self.number = 0
        """Digests that this rank has sent."""
        self._sent: list[_Sent] = []
        self._absent = False
        """Whether the others have been told that this rank makes no call any more."""

    def compare(self, digest: int, time: int) -> tuple[bool, int]:
        """Whether all ranks have the same digest, and the longest time of all ranks. Collective."""
        self.number += 1
        least = largest = digest
        for stage, distances in enumerate(self._rounds):
            sending, receiving = self._stage(
                stage, distances, torch.tensor([least, largest, time], dtype=torch.int64, device="cpu")
            )
            for work, theirs in receiving:
                work.wait()
                low, high, other = theirs.tolist()
                least, largest, time = min(least, low), max(largest, high), max(time, other)
            for work, _ in sending:
                work.wait()
        return least == largest, time

    def send(self, digest: int) -> None:
        """Send a digest to all ranks that this rank sends to in any round, without waiting."""
        self.number += 1
        sending, receiving = [], []
        mine = torch.tensor([digest, digest, 0], dtype=torch.int64, device="cpu")
        try:
            for stage, distances in enumerate(self._rounds):
                out, back = self._stage(stage, distances, mine)
                sending += out
                receiving += back
        except RuntimeError:  # another rank is gone already, and reports its own error
            pass
        self._sent.append(_Sent(self.number, digest, sending, receiving))

    def say_absent(self) -> None:
        """Release ranks that wait for this one; nothing can be compared any more."""
        if not self._absent:
            self._absent = True
            self.send(_ABSENT)

    def first_different(self) -> int | None:
        """Receive the others' digests for those that this rank has only sent.

        Returns:
            The number of the first that differs; what was sent after it is not received. None if all are equal.
        """
        while self._sent:
            number, digest, sending, receiving = self._sent.pop(0)
            for work, _ in (*receiving, *sending):
                work.wait()
            if digest == _ABSENT or any(value != digest for _, theirs in receiving for value in theirs.tolist()[:2]):
                return number
        return None

    def _stage(
        self, stage: int, distances: list[int], mine: Tensor
    ) -> tuple[list[tuple[Any, Tensor]], list[tuple[Any, Tensor]]]:
        rank, size, group = self._rank, self._size, self._group
        sending = [(group.send([mine], (rank + distance) % size, stage), mine) for distance in distances]
        receiving = []
        for distance in distances:
            theirs = torch.empty(3, dtype=torch.int64, device="cpu")
            receiving.append((group.recv([theirs], (rank - distance) % size, stage), theirs))
        return sending, receiving


def _rounds(size: int) -> Iterator[list[int]]:
    """Distances to the peers of each round of a dissemination exchange, after which every rank has heard of every
    other.
    """
    step = 1
    while step < size:
        yield [step * turn for turn in range(1, _RADIX) if step * turn < size]
        step *= _RADIX
