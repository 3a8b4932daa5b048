"""How a run ends: errors of gloo and NCCL become those of their cause, and a process that waits for ranks that are gone
is ended.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from unishard.distributed.error_text import errors_in, text_of
from unishard.errors import RankMismatchError
from unishard.failures import monitor_client
from unishard.failures.monitor_client import MonitorClient
from unishard.failures.monitor_server import ENDED
from unishard.failures.rank_locations import may_wait_for_ranks, position_of, where_raised

_NEWS = 3.0
"""Seconds to wait for the cause of a broken connection."""
_GRACE = 3.0
"""Seconds that a thread may stand still in a collective after the end of another rank."""
_SHOWN = 300
"""Characters of a line of an error's text."""
_WORKER = "Original Traceback (most recent call last):"
_SIGNS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe")


def headline(error: BaseException) -> str:
    """An error in one line: its class, the first line of its text, and the user's line that raised it; of a group also
    the first error.
    """
    lines = text_of(error).strip().split("\n")
    text = lines[0][:_SHOWN]
    if _WORKER in lines:  # torch's text of an error in a worker of a DataLoader ends with that error
        text += f" {lines[-1][:_SHOWN]}"
    where = where_raised(error)
    line = f"{type(error).__name__}{': ' if text else ''}{text}{f' ({where})' if where else ''}"
    inner = next(errors_in(error))
    return line if inner is error else f"{line}: {headline(inner)}"


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error says that another rank could not be reached."""
    text = text_of(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError | OSError) and any(sign in text for sign in _SIGNS)
    )


@contextmanager
def naming_causes() -> Iterator[None]:
    """A block in which the error of a collective becomes a RankMismatchError that names the rank whose end has caused
    it.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise_cause(error)
        raise


def raise_cause(error: BaseException) -> None:
    """Raise a RankMismatchError if another rank's end explains an error."""
    line = monitor_client.current()
    if line is None or isinstance(error, RankMismatchError) or not is_lost_connection(error):
        return
    if cause := line.cause(_NEWS):
        place = line.place()
        where = f" {place} and" if place.startswith("is in ") else ""
        raise RankMismatchError(f"{cause}; rank {line.rank}{where} cannot go on") from None


class StuckProcess:
    """Ends this process if its thread stands still in a collective after another rank has ended: gloo's wait cannot be
    interrupted.
    """

    def __init__(self, line: MonitorClient, say: Callable[[str], None]) -> None:
        """Start to look.

        Args:
            line: The line of this process.
            say: Writes why the process ends.
        """
        self._line, self._say = line, say
        self._position: tuple[int, ...] = ()
        self._since = 0.0

    def look(self) -> None:
        """Called a few times a second once the run cannot go on."""
        now, before, self._position = time.monotonic(), self._position, position_of(self._line.thread)
        line = self._line
        # A rank may go on without those that have ended well: rank 0 may compute, write and upload what it likes.
        well = not line.verdict and all(ending.how == ENDED for ending in line.others())
        if before != self._position or not may_wait_for_ranks(line.thread, surely=well):
            self._since = now
            return
        # Where all ranks live, the end of one makes the collectives of the others fail, so that these raise an error.
        grace = 2 * _GRACE if line.verdict and line.rank != line.size - 1 else _GRACE
        if now - self._since >= grace:
            self._say(line.cause())
            sys.stderr.flush()
            os._exit(1)
