"""How a rank ended, as the others learn of it."""

from __future__ import annotations

from typing import NamedTuple

from unishard.failures.monitor_server import DIED


class Ending(NamedTuple):
    """The end of a rank's process, or of its part in the run."""

    rank: int
    text: str
    """`raised ValueError: a broken sample (train.py:31 in main)`; empty if it ended without a word."""
    how: str

    def __str__(self) -> str:
        died = "is gone: its process ended without an error (killed, for lack of memory, or in C++)"
        return f"rank {self.rank} {died if self.how == DIED else self.text}"
