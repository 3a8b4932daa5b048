"""The watchdog: a thread that looks once a second whether this rank stands still, and tells the monitor where."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from typing import Any, Protocol

import torch.distributed as dist

from unishard.failures.call_log import CallLog
from unishard.failures.deadlocks import BUSY, LEFT, MEETS, WAITS, Standstill
from unishard.failures.device_wait import DeviceWait
from unishard.failures.monitor_client import MonitorClient
from unishard.failures.rank_locations import Location, has_other_threads, position_of, where_is
from unishard.failures.traffic import Traffic

_LONG = 6
"""Timeouts until a long call is reported that no other rank waits for."""
_QUIET = 5.0
"""Seconds in one call until the monitor learns of it, at most: updates of large models take seconds."""
_REPORTED = 64
"""How many of the last calls it gets."""

_logger = logging.getLogger("unishard")


class Watched(Protocol):
    """What the watchdog reads of a check. Written by the training thread."""

    world: dist.ProcessGroup | None
    timeout: float
    limit: float
    """As in `Standstill`."""
    active: int
    """Open engines."""
    failed: str
    call_log: CallLog
    waiting: bool
    """Whether it waits for other ranks before a call."""
    moved: float
    """When its last call began, or stopped to wait for other ranks."""
    device_wait: DeviceWait | None
    """The last collectives on a device that the host may be waiting for, if any."""
    thread: int
    rank: int
    gloo: bool
    """As in `Standstill`."""
    monitor: MonitorClient | None

    def give_up(self, why: str) -> None:
        """Make the next call fail, and release ranks that wait for this one."""


class _Watch:
    """Looks at one check."""

    def __init__(self) -> None:
        self._warned = -1
        self._reported: tuple[Any, ...] | None = None
        """The last report of this call to the monitor."""
        self._position: tuple[int, ...] = ()
        self._blocked_since: float | None = None
        self._traffic: Traffic | None = None

    def look(self, check: Watched) -> None:
        """Tell the monitor where this rank is, if it has made no call for a while."""
        if check.failed or check.monitor is None:
            return
        if check.monitor.abort_reason:
            check.give_up(check.monitor.abort_reason)
            return
        still = time.monotonic() - check.moved
        if still < min(_QUIET, check.timeout / 4):
            self._blocked_since = self._traffic = None
            if self._reported is not None:
                self._reported = None
                check.monitor.status(None)
            return
        check.monitor.ask()
        if self._traffic is None:
            self._traffic = Traffic(check.monitor.port)
        quiet = self._traffic.look()
        tail = check.call_log.tail()
        here = where_is(check.thread)
        doing, place, group = self._find(check, here)
        # Where a late rank is in the caller's code is reported at each look.
        report = (tail.epoch, tail.number, doing, int(2 * still / check.timeout) if here.inside else still)
        if report != self._reported:
            self._reported, tail = report, tail._replace(calls=tail.calls[-_REPORTED:])
            seconds = time.monotonic() - self._blocked_since if doing == WAITS and self._blocked_since else still
            inside, threads = here.inside or check.waiting, has_other_threads(check.thread)
            check.monitor.status(
                Standstill(
                    tail, doing, place, inside, seconds, check.timeout, group, threads, quiet, check.gloo, check.limit
                )
            )
        if doing != MEETS and here.inside and still >= _LONG * check.timeout and self._warned != tail.number:
            self._warned = tail.number
            _logger.warning(
                "rank %d %s for %.0f s, at %s",
                check.rank,
                check.call_log.place.replace("is", "has been", 1),
                still,
                here.text,
            )

    def _find(self, check: Watched, here: Location) -> tuple[str, str, tuple[int, ...]]:
        """What this rank does, where it is in words, and which ranks it waits for, if not for all."""
        call, wait, group = check.call_log.place, check.device_wait, here.group
        if check.waiting:
            calls = check.call_log.tail().calls
            return MEETS, calls[-1].text if calls else call, ()
        if wait is not None and (here.inside or wait.ended) and wait.holds():
            group = ()  # the host waits for what is queued there or behind that, perhaps outside
        if self._is_blocked(check, group is not None):
            waits = f"waits in torch.distributed at {here.text}"
            return WAITS, f"{call}, {waits}" if here.inside else f"{waits}, outside unishard", group or ()
        if not check.active and not here.inside:
            return LEFT, call, ()
        return BUSY, f"{call} at {here.text}" if here.inside else f"is at {here.text}, outside unishard", ()

    def _is_blocked(self, check: Watched, collective: bool) -> bool:
        """Whether the thread has been in the same collective for a quarter of the timeout."""
        now, before, self._position = time.monotonic(), self._position, position_of(check.thread)
        if not collective:
            self._blocked_since = None
        elif self._blocked_since is None or before != self._position:
            self._blocked_since = now
        return self._blocked_since is not None and now - self._blocked_since >= check.timeout / 4


def watch(check: Watched) -> None:
    """Start the watchdog of a check; it ends with the check or its process group."""
    reference, ended, interval = weakref.ref(check), threading.Event(), min(1.0, check.timeout / 10)

    def run() -> None:
        watchdog = _Watch()
        while not ended.wait(interval):
            check = reference()
            if check is None or check.world is not dist.group.WORLD:
                return
            watchdog.look(check)
            del check

    thread = threading.Thread(target=run, name="unishard-desync", daemon=True)
    thread.start()

    def end() -> None:  # a thread inside torch during interpreter finalization would abort the process
        ended.set()
        thread.join(5.0)

    atexit.register(end)
