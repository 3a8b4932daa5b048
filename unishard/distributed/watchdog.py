"""Looks once a second, on a thread of its own, whether ranks are late, and says which and where."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from typing import Protocol

import torch.distributed as dist

from unishard.distributed.device_wait import DeviceWait
from unishard.distributed.rank_locations import Places, describe, stack_of

__all__ = ["Watched", "watch"]

_LONG = 6
"""Patience with a rank that is inside a call which others need not wait for, in timeouts."""

_logger = logging.getLogger("unishard")


class Watched(Protocol):
    """What the watch sees of a check. It is written by the thread that trains."""

    world: dist.ProcessGroup | None
    timeout: float
    active: int
    failed: str
    number: int
    """Of the last check that this rank came to."""
    place: str
    last: str
    waiting: bool
    """Whether it waits there for other ranks."""
    moved: float
    """When it came to it or got on."""
    device_wait: DeviceWait | None
    """What the host waits for on a device, if it may."""
    thread: int
    rank: int
    size: int
    places: Places

    def speak(self, number: int, place: str) -> None:
        """Say for this rank that it will never come to a check."""


class _Watch:
    """Names ranks that are late, and speaks for this one where it waits in a collective that the others will never join."""

    def __init__(self) -> None:
        self._warned = 0
        self._blocked_since: float | None = None

    def look(self, check: Watched) -> None:
        still = time.monotonic() - check.moved
        if check.failed or not check.active or still < check.timeout / 2:
            self._blocked_since = None
        elif check.waiting:
            self._ask(check, check.number, still)
        elif check.places.asked(check.number + 1):
            self._answer(check, check.number + 1)
        elif still >= _LONG * check.timeout and self._warned != check.number:
            self._warn_of_long_call(check, still)

    def _ask(self, check: Watched, number: int, still: float) -> None:
        check.places.ask(number)
        check.places.tell(number, "seen", check.place)
        if still >= check.timeout and self._warned != number:
            self._warned = number
            found = check.places.read(number, "seen", 0.0)
            where = describe(found, set(range(check.size)) - set(found), check.last)
            _logger.warning("rank %d has waited %.0f s for other ranks: %s", check.rank, still, where)

    def _answer(self, check: Watched, number: int) -> None:
        where, inside, collective = stack_of(check.thread)
        if inside and (wait := check.device_wait) is not None:
            collective = wait.holds()
        if not collective:
            self._blocked_since = None
            check.places.tell(number, "seen", f"{check.place} at {where}" if inside else f"is at {where}, outside unishard")
            return
        place = f"waits in torch.distributed at {where}, {'in a call of an engine' if inside else 'outside unishard'}"
        check.places.tell(number, "seen", place)
        now = time.monotonic()
        self._blocked_since = self._blocked_since or now
        if now - self._blocked_since < check.timeout / 4:
            return
        seen = check.places.read(number, "seen", 0.0)
        busy = [text for text in seen.values() if " at " in text and "torch.distributed" not in text]
        if len(seen) == check.size and not busy:  # whoever is not at the check waits elsewhere: nobody can ever get on
            check.speak(number, place)

    def _warn_of_long_call(self, check: Watched, still: float) -> None:
        where, inside, _ = stack_of(check.thread)
        self._warned = check.number
        if inside:
            _logger.warning("rank %d %s for %.0f s, at %s", check.rank, check.place.replace("is", "has been", 1), still, where)


def watch(check: Watched) -> None:
    """Look at a check for as long as it lives and its process group is up."""
    reference, ended, interval = weakref.ref(check), threading.Event(), min(1.0, check.timeout / 10)

    def run() -> None:
        own = _Watch()
        while not ended.wait(interval):
            check = reference()
            if check is None or check.world is not dist.group.WORLD:
                return
            own.look(check)
            del check

    thread = threading.Thread(target=run, name="unishard-desync", daemon=True)
    thread.start()

    def end() -> None:  # a thread inside torch while the interpreter finalises would abort the process
        ended.set()
        thread.join(5.0)

    atexit.register(end)
