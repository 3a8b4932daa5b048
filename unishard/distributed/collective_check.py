"""Turns ranks that make different calls into one error on all of them, before any of them enters a collective of the engine.

Every collective call of an engine starts with a rendezvous: each rank sends a digest of where it is to the others over gloo and
waits for theirs. If all are equal, the call goes on; else every rank knows it, writes its place into the store, reads those of the
others and raises. Nobody is left inside a collective, which on gloo nothing can abort (torch 2.13).
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.config import Communication
from unishard.distributed.device_wait import DeviceWait
from unishard.distributed.process_group import TIMEOUT
from unishard.distributed.rank_locations import Places, describe
from unishard.distributed.watchdog import watch
from unishard.errors import RankMismatchError

__all__ = ["DesyncCheck", "Member", "join", "meet", "samples"]

LATE = TIMEOUT
"""How long a rank may be late outside the library."""
_RADIX = 8
"""Up to as many ranks talk to each other directly; with more, in log(ranks) rounds."""
_ANSWER = 3.0
"""Seconds to wait for another rank to say where it is."""
_EVERY = 10
"""Updates between two that are checked, and those at the start that all are."""
_ABSENT = 2**40
"""A digest that no call has: who gets it raises."""

_current: DesyncCheck | None = None


class _Sent(NamedTuple):
    """A record that this rank has sent without waiting for those of the others."""

    number: int
    digest: int
    sending: list[tuple[Any, Tensor]]
    receiving: list[tuple[Any, Tensor]]


class Member:
    """One engine's view of the check: what it calls itself, and whether it still takes part."""

    def __init__(self, check: DesyncCheck) -> None:
        self._check = check
        check.members += 1
        check.active += 1
        self._number = check.members

    def enter(self, call: str, detail: str = "") -> None:
        """Before the collectives of a call. Collective.

        Raises:
            RankMismatchError: Another rank is in another call, has left, or is gone; names who is where.
        """
        self._check.enter(f"is in {self._name}.{call}" + (f" ({detail})" if detail else ""))

    def leave(self, why: BaseException | None = None) -> None:
        """This engine is closed. Waits for nobody; ranks that still use it learn of it."""
        self._check.leave(f"has closed the {self._name}", "" if why is None else f", leaving with {_headline(why)}")

    @contextmanager
    def reading(self, device: torch.device) -> Iterator[None]:
        """Around collectives on a device and the reading of what they give, so that the watch knows what the host waits for."""
        self._check.device_wait = DeviceWait.on(device) if device.type == "cuda" else None
        try:
            yield
        finally:
            self._check.device_wait = None

    @property
    def _name(self) -> str:
        return "engine" if self._check.active == 1 else f"engine {self._number}"


def meet(place: str) -> None:
    """Check a call that belongs to no engine, if there has been one in this process group. Collective."""
    if _current is not None and _current.world is dist.group.WORLD:
        _current.enter(f"is in {place}")


def samples(updates: int) -> bool:
    """Whether the calls around an update are checked: all of the first ones, where loops go wrong mostly, then every tenth.

    Waking another process costs about a millisecond on a busy machine, which is too much for every call of a short step.

    Args:
        updates: Accumulation windows that an engine has ended, the same on every rank.
    """
    return updates < _EVERY or updates % _EVERY == 0


def join(cfg: Communication) -> Member | None:
    """Take part in the check of the process group that is up, or None where there is nothing to check. Collective."""
    global _current
    if dist.get_world_size() == 1 or not cfg.desync_check:
        return None
    if _current is None or _current.world is not dist.group.WORLD:
        _current = DesyncCheck(cfg.desync_timeout)
    _current.timeout = cfg.desync_timeout
    return Member(_current)


class DesyncCheck:
    """The rendezvous of all ranks of one process group. Used by one thread at a time."""

    def __init__(self, timeout: float) -> None:
        """Collective.

        Args:
            timeout: Seconds after which a rank that does not come is asked where it is.
        """
        self.world = dist.group.WORLD
        self.timeout = timeout
        self.members = self.active = 0
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=LATE)  # gloo also beside NCCL: nothing here waits for a device
        self.places = Places(self._group.get_group_store(), self.rank, self.size)
        self._rounds = list(_rounds(self.size))
        self.number = 0
        self.place = self.last = "is before its first call"
        self._sent: list[_Sent] = []
        self.failed = ""
        self.waiting = False
        self.device_wait: DeviceWait | None = None
        self.thread = threading.get_ident()
        self.moved = time.monotonic()
        self._lock = threading.Lock()
        watch(self)

    def enter(self, place: str) -> None:
        """See `Member.enter`."""
        if self.failed:
            raise RankMismatchError(self.failed)
        try:
            self._begin_call(place)
            agreed = self._exchange(zlib.crc32(place.encode()))
        except RankMismatchError:
            raise
        except RuntimeError:  # gloo: the other end is gone, or late beyond LATE
            self._fail(place)
        finally:
            self.waiting = False
            self.moved = time.monotonic()
        if not agreed:
            raise RankMismatchError(self._report(self.number, place))

    def leave(self, place: str, why: str) -> None:
        """See `Member.leave`."""
        self.active -= 1
        if self.failed or self.world is not dist.group.WORLD:
            return
        with self._lock:
            self._begin(place)
            self._send(zlib.crc32(place.encode()), place + why)

    def speak(self, number: int, place: str) -> None:
        """From the watch: this rank will never come to a check, and the others need not wait."""
        with self._lock:
            if self.number + 1 == number:
                self._begin(place)
                self._send(_ABSENT, place)

    def _begin_call(self, place: str) -> None:
        while True:
            self._settle()
            with self._lock:  # against the watch, which may speak for this rank meanwhile
                if not self._sent:
                    self._begin(place)
                    self.waiting = True
                    return

    def _begin(self, place: str) -> None:
        self.number += 1
        self.last, self.place = self.place, place
        self.thread, self.moved = threading.get_ident(), time.monotonic()

    def _exchange(self, digest: int) -> bool:
        """Whether all ranks hold the same digest. Two integers travel from rank to rank, the least and the largest digest."""
        least = largest = digest
        for stage, distances in enumerate(self._rounds):
            sending, receiving = self._stage(stage, distances, torch.tensor([least, largest], dtype=torch.int64, device="cpu"))
            for work, theirs in receiving:
                work.wait()
                low, high = theirs.tolist()
                least, largest = min(least, low), max(largest, high)
            for work, _ in sending:
                work.wait()
        return least == largest

    def _send(self, digest: int, text: str) -> None:
        """Send a digest to whom this rank sends in any round, and wait for nobody."""
        self.places.tell(self.number, "place", text)
        sending, receiving = [], []
        mine = torch.tensor([digest, digest], dtype=torch.int64, device="cpu")
        try:
            for stage, distances in enumerate(self._rounds):
                out, back = self._stage(stage, distances, mine)
                sending += out
                receiving += back
        except RuntimeError:  # another rank is gone already, and its own end says why
            pass
        self._sent.append(_Sent(self.number, digest, sending, receiving))

    def _stage(self, stage: int, distances: list[int], mine: Tensor) -> tuple[list[tuple[Any, Tensor]], list[tuple[Any, Tensor]]]:
        rank, size, group = self.rank, self.size, self._group
        sending = [(group.send([mine], (rank + distance) % size, stage), mine) for distance in distances]
        receiving = []
        for distance in distances:
            theirs = torch.empty(2, dtype=torch.int64, device="cpu")
            receiving.append((group.recv([theirs], (rank - distance) % size, stage), theirs))
        return sending, receiving

    def _settle(self) -> None:
        """Hear what the others did when this rank went on without them."""
        while self._sent:
            number, digest, sending, receiving = self._sent.pop(0)
            self.waiting, self.moved = True, time.monotonic()
            try:
                for work, _ in (*receiving, *sending):
                    work.wait()
            except RuntimeError:
                self._fail(self.place)
            if digest == _ABSENT or any(value != digest for _, theirs in receiving for value in theirs.tolist()):
                raise RankMismatchError(self._report(number, None))

    def _fail(self, place: str) -> NoReturn:
        """A rank is gone. The rendezvous is of no use any more."""
        self.failed = self._report(self.number, place)
        self._send(_ABSENT, place)
        raise RankMismatchError(self.failed) from None

    def _report(self, number: int, place: str | None) -> str:
        """Tell the others where this rank is (None: it has), and say where they are."""
        if place is not None:
            self.places.tell(number, "place", place)
        found = self.places.read(number, "place", _ANSWER)
        if place is not None:
            found[self.rank] = place  # also where the rank that serves the store is gone
        where = describe(found, set(range(self.size)) - set(found), self.last)
        return f"ranks do not make the same calls, and would wait for each other for ever: {where}"


def _headline(error: BaseException) -> str:
    """An error in one line. Of one of ours only the name, since it would name the places of all ranks once more."""
    kind, text = type(error).__name__, str(error).partition("\n")[0][:200]
    return kind if isinstance(error, RankMismatchError) or not text else f"{kind}: {text}"


def _rounds(size: int) -> Iterator[list[int]]:
    """Distances to the ranks that one talks to in each round, so that everyone hears of everyone (dissemination)."""
    step = 1
    while step < size:
        yield [step * turn for turn in range(1, _RADIX) if step * turn < size]
        step *= _RADIX
