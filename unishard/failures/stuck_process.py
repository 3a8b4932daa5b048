"""Ends a process that waits in a collective for ranks that are gone."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from unishard.failures.monitor_client import MonitorClient
from unishard.failures.monitor_server import ENDED
from unishard.failures.rank_locations import may_wait_for_ranks, position_of

_GRACE = 3.0
"""Seconds that a thread may stand still in a collective after the end of another rank."""


class StuckProcess:
    """Ends this process if its thread stands still in a collective after another rank has ended: gloo's wait cannot be
    interrupted.
    """

    def __init__(self, monitor: MonitorClient, say: Callable[[str], None]) -> None:
        """Start to look.

        Args:
            monitor: The connection of this process.
            say: Writes why the process ends.
        """
        self._monitor, self._say = monitor, say
        self._position: tuple[int, ...] = ()
        self._since = 0.0

    def look(self) -> None:
        """Called a few times a second once the run cannot go on."""
        now, before, self._position = time.monotonic(), self._position, position_of(self._monitor.thread)
        monitor = self._monitor
        # A rank may go on without those that have ended well: rank 0 may compute, write and upload what it likes.
        well = not monitor.abort_reason and all(ending.how == ENDED for ending in monitor.others())
        if before != self._position or not may_wait_for_ranks(monitor.thread, surely=well):
            self._since = now
            return
        # Where all ranks live, the end of one makes the collectives of the others fail, so that these raise an error.
        grace = 2 * _GRACE if monitor.abort_reason and monitor.rank != monitor.size - 1 else _GRACE
        if now - self._since >= grace:
            self._say(monitor.cause())
            sys.stderr.flush()
            os._exit(1)
