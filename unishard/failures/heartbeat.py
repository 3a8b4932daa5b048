"""Finds a process that does not answer although its connection is open. If that process is known to be stopped, the run
ends. If its machine hangs, the connection ends (`connections.keep_alive`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from unishard.failures.process_state import is_stopped

_logger = logging.getLogger("unishard")

SILENT = "silent"
"""How a rank that no longer answers has ended."""
TIMEOUTS = 6
"""After so many `communication.desync_timeout` without an answer, a rank that is stopped counts as ended."""
_STEP = 1.0
"""Seconds that count between two looks, at most: more have passed only if this process itself was stopped."""


class HeartbeatTimeout:
    """Measures for how long other ranks have sent nothing while a rank waits for them.

    Used by the monitor, and by each rank for the monitor.
    """

    def __init__(self) -> None:
        self._warned: set[int] = set()
        self.patience = 30.0
        """`communication.desync_timeout`, once it is known."""
        self._clock = self._asked = 0.0
        self._looked = time.monotonic()
        self._heard: dict[int, float] = {}

    @property
    def limit(self) -> float:
        """Seconds without an answer after which a rank that is stopped counts as ended."""
        return TIMEOUTS * self.patience

    @property
    def text(self) -> str:
        """What is said of such a rank."""
        return f"has not answered for {self.limit:.0f} s: its process is stopped (SIGSTOP, a debugger)"

    def heard(self, rank: int) -> None:
        """Note that a rank has said something."""
        self._heard[rank] = self._clock

    def has_ended(self, rank: int, process: Any) -> bool:
        """Whether a rank that has given no answer for too long is stopped; warns once of one that is not known to be.

        Args:
            rank: The rank.
            process: Its process, see `process_state`.
        """
        if is_stopped(process):
            return True
        if rank not in self._warned:
            self._warned.add(rank)
            _logger.warning(
                "rank %d has not answered for %.0f s: it runs code that holds Python's lock, or is stopped; it is "
                "waited for",
                rank,
                self.limit,
            )
        return False

    def rest(self) -> None:
        """Note that no rank waits."""
        self._heard.clear()
        self._warned.clear()
        self._looked = time.monotonic()

    def look(self, ranks: Iterable[int]) -> tuple[bool, list[int]]:
        """Called about once a second while a rank waits.

        Returns:
            Whether to ask these ranks for an answer now, and which of them have given none for too long.
        """
        now = time.monotonic()
        self._clock += min(now - self._looked, _STEP)
        self._looked = now
        since = {rank: self._clock - self._heard.setdefault(rank, self._clock) for rank in ranks}
        ask = self._clock - self._asked >= self.limit / 4
        if ask:
            self._asked = self._clock
        return ask, [rank for rank, seconds in since.items() if seconds > self.limit]
