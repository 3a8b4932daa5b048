"""Finds a process that answers nothing although its connection is open: it is stopped, or its machine hangs."""

from __future__ import annotations

import time
from collections.abc import Iterable

SILENT = "silent"
"""How a rank has ended that answers nothing."""
TIMEOUTS = 6
"""After so many `communication.desync_timeout` without an answer, a rank counts as ended."""
_STEP = 1.0
"""Seconds that count between two looks, at most: more have passed only if this process itself was stopped."""


class HeartbeatTimeout:
    """For how long others have sent nothing while a rank waits for them.

    Used by the monitor, and by each rank for the monitor.
    """

    def __init__(self) -> None:
        self.patience = 30.0
        """`communication.desync_timeout`, once it is known."""
        self._clock = self._asked = 0.0
        self._looked = time.monotonic()
        self._heard: dict[int, float] = {}

    @property
    def limit(self) -> float:
        """Seconds without an answer after which a rank counts as ended."""
        return TIMEOUTS * self.patience

    @property
    def text(self) -> str:
        """What is said of such a rank."""
        return (
            f"has not answered for {self.limit:.0f} s: its process is stopped (SIGSTOP, a debugger), or its machine "
            "hangs"
        )

    def heard(self, rank: int) -> None:
        """Note that a rank has said something."""
        self._heard[rank] = self._clock

    def rest(self) -> None:
        """Note that no rank waits."""
        self._heard.clear()
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
