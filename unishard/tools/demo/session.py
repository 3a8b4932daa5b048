"""Runs a command in a new session, and makes sure that no process outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

_REQUESTS = (signal.SIGTERM, signal.SIGHUP)
_GRACE = 40.0
"""Seconds until the command is killed; torchrun kills ranks after 30 (torch 2.13, multiprocessing/api.py)."""


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a new session, with stdout and stderr as one stream of text.

    Leaving the block waits for the command to exit. On an exception, including Ctrl-C, the command and its children are
    terminated first. SIGTERM and SIGHUP to this process become such an exception: `SystemExit` with 128 plus the signal
    number.
    """
    # A new session, so that only we signal torchrun, and not the terminal too while it terminates its ranks.
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
    process.terminate()  # torchrun forwards it to its ranks, which have their own sessions
    try:
        process.communicate(timeout=_GRACE)  # until all processes that hold the stream have exited
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _handling(signals: Sequence[signal.Signals], handler: Any) -> Iterator[None]:
    """Install a handler for signals, except those that this process was started to ignore (nohup); restores the
    previous handlers.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {
            number: signal.getsignal(number) for number in signals if signal.getsignal(number) is not signal.SIG_IGN
        }
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
