"""Checks that all ranks make the same collective calls; on a mismatch, raises an error on all ranks that names each rank's call.

Every collective call of an engine starts with a rendezvous: each rank sends a digest of its call to the others over gloo and waits for
theirs. If all are equal, the call continues; else every rank writes its call into the store, reads those of the others and raises. So no
rank is left inside a collective, which cannot be aborted on gloo (torch 2.13).
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
"""Up to this many ranks exchange digests in one round; more ranks need log(ranks) rounds."""
_ANSWER = 3.0
"""Seconds to wait for another rank to report its call."""
_EVERY = 10
"""Check every tenth optimizer step, and all of the first ten."""
_ABSENT = 2**40
"""A digest that no call has: a rank that receives it raises."""

_current: DesyncCheck | None = None


class _Sent(NamedTuple):
    """A digest that this rank has sent without waiting for the others' digests."""

    number: int
    digest: int
    sending: list[tuple[Any, Tensor]]
    receiving: list[tuple[Any, Tensor]]


class Member:
    """One engine's access to the check."""

    def __init__(self, check: DesyncCheck) -> None:
        self._check = check
        check.members += 1
        check.active += 1
        self._number = check.members

    def enter(self, call: str, detail: str = "") -> None:
        """Check the ranks before the collectives of a call. Collective.

        Raises:
            RankMismatchError: Another rank is in another call, has closed its engine, or is gone; names each rank's call.
        """
        self._check.enter(f"is in {self._name}.{call}" + (f" ({detail})" if detail else ""))

    def leave(self, why: BaseException | None = None) -> None:
        """Report that this engine is closed. Does not wait; ranks that still use the engine raise an error."""
        self._check.leave(f"has closed the {self._name}", "" if why is None else f", leaving with {_headline(why)}")

    @contextmanager
    def reading(self, device: torch.device) -> Iterator[None]:
        """Wrap collectives on a device and reads of their results, so that the watchdog knows what the host waits for."""
        self._check.device_wait = DeviceWait.on(device) if device.type == "cuda" else None
        try:
            yield
        finally:
            self._check.device_wait = None

    @property
    def _name(self) -> str:
        return "engine" if self._check.active == 1 else f"engine {self._number}"


def meet(place: str) -> None:
    """Check a call outside an engine, if this process group has had an engine. Collective."""
    if _current is not None and _current.world is dist.group.WORLD:
        _current.enter(f"is in {place}")


def samples(updates: int) -> bool:
    """Whether the calls of an optimizer step are checked: all of the first ones, where most mistakes show, then every tenth.

    Waking another process takes about a millisecond on a busy machine, too much for every call of a short step.

    Args:
        updates: Completed accumulation windows of an engine, the same on every rank.
    """
    return updates < _EVERY or updates % _EVERY == 0


def join(cfg: Communication) -> Member | None:
    """Join the check of the current process group; None if there is nothing to check. Collective."""
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
        """Create the check. Collective.

        Args:
            timeout: Seconds after which a late rank is asked for its call.
        """
        self.world = dist.group.WORLD
        self.timeout = timeout
        self.members = self.active = 0
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=LATE)  # gloo even with NCCL: nothing here waits for a device
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
        except RuntimeError:  # gloo: the other rank is gone, or later than LATE
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
        """Called by the watchdog: this rank will never reach a check, and the others need not wait."""
        with self._lock:
            if self.number + 1 == number:
                self._begin(place)
                self._send(_ABSENT, place)

    def _begin_call(self, place: str) -> None:
        while True:
            self._settle()
            with self._lock:  # the watchdog may answer for this rank at the same time
                if not self._sent:
                    self._begin(place)
                    self.waiting = True
                    return

    def _begin(self, place: str) -> None:
        self.number += 1
        self.last, self.place = self.place, place
        self.thread, self.moved = threading.get_ident(), time.monotonic()

    def _exchange(self, digest: int) -> bool:
        """Whether all ranks have the same digest. The ranks exchange the minimum and the maximum digest."""
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
        """Send a digest to all ranks that this rank sends to in any round, without waiting."""
        self.places.tell(self.number, "place", text)
        sending, receiving = [], []
        mine = torch.tensor([digest, digest], dtype=torch.int64, device="cpu")
        try:
            for stage, distances in enumerate(self._rounds):
                out, back = self._stage(stage, distances, mine)
                sending += out
                receiving += back
        except RuntimeError:  # another rank is gone already, and reports its own error
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
        """Receive the others' digests for the calls that this rank did not wait for."""
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
        """Raise because a rank is gone. The check cannot be used any more."""
        self.failed = self._report(self.number, place)
        self._send(_ABSENT, place)
        raise RankMismatchError(self.failed) from None

    def _report(self, number: int, place: str | None) -> str:
        """Publish this rank's call (None: already published), and describe the calls of all ranks."""
        if place is not None:
            self.places.tell(number, "place", place)
        found = self.places.read(number, "place", _ANSWER)
        if place is not None:
            found[self.rank] = place  # even if the rank that serves the store is gone
        where = describe(found, set(range(self.size)) - set(found), self.last)
        return f"ranks made different calls and would deadlock: {where}"


def _headline(error: BaseException) -> str:
    """An error in one line; a RankMismatchError only by its name, since its message lists all ranks again."""
    kind, text = type(error).__name__, str(error).partition("\n")[0][:200]
    return kind if isinstance(error, RankMismatchError) or not text else f"{kind}: {text}"


def _rounds(size: int) -> Iterator[list[int]]:
    """Distances to the peers of each round of a dissemination exchange, after which every rank has heard of every other."""
    step = 1
    while step < size:
        yield [step * turn for turn in range(1, _RADIX) if step * turn < size]
        step *= _RADIX
