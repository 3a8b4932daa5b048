"""Runs a command in processes of its own, and leaves none of them behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["running"]

_REQUESTS = (signal.SIGTERM, signal.SIGHUP)
_GRACE = 40.0
"""Seconds to end by itself; torchrun kills ranks that do not end within 30 (torch 2.13, multiprocessing/api.py)."""


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own, its output one stream of text.

    Leaving the block waits for its end. When an exception leaves it, Ctrl-C included, the command and all it started are ended
    first; a request to end this process (SIGTERM, SIGHUP) is such an exception: `SystemExit` with 128 plus the signal's number.
    """
    # A session of its own: torchrun is told once, by us, and not by the terminal as well while it is ending its ranks.
    with (
        _handling(_REQUESTS, _leave),
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        except BaseException:
            with _handling((*_REQUESTS, signal.SIGINT), signal.SIG_IGN):
                _end(process)
            raise


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()  # torchrun hands it on to its ranks, which have sessions of their own
    try:
        process.communicate(timeout=_GRACE)  # until the last one that holds the stream is gone
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _handling(signals: Sequence[signal.Signals], handler: Any) -> Iterator[None]:
    """Signals handled in this way, except those that this process was started to ignore (nohup)."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in signals if signal.getsignal(number) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
