"""The watchdog: a thread that checks once a second whether ranks are late, and reports which ones and where they are."""

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
"""Timeouts until a long call is reported that no other rank waits for."""

_logger = logging.getLogger("unishard")


class Watched(Protocol):
    """What the watchdog reads of a check. Written by the training thread."""

    world: dist.ProcessGroup | None
    timeout: float
    active: int
    failed: str
    number: int
    """Number of the last check that this rank reached."""
    place: str
    last: str
    waiting: bool
    """Whether it waits for other ranks in this check."""
    moved: float
    """When it reached or left the check."""
    device_wait: DeviceWait | None
    """What the host may be waiting for on a device, if anything."""
    thread: int
    rank: int
    size: int
    places: Places

    def speak(self, number: int, place: str) -> None:
        """Report for this rank that it will never reach a check."""


class _Watch:
    """Reports late ranks, and answers for this rank if it waits in a collective that the others will never join."""

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
        if len(seen) == check.size and not busy:  # every rank waits, at this check or elsewhere: a deadlock
            check.speak(number, place)

    def _warn_of_long_call(self, check: Watched, still: float) -> None:
        where, inside, _ = stack_of(check.thread)
        self._warned = check.number
        if inside:
            _logger.warning("rank %d %s for %.0f s, at %s", check.rank, check.place.replace("is", "has been", 1), still, where)


def watch(check: Watched) -> None:
    """Start the watchdog of a check; it ends with the check or its process group."""
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

    def end() -> None:  # a thread inside torch during interpreter finalization would abort the process
        ended.set()
        thread.join(5.0)

    atexit.register(end)
