"""Ends a stuck process at the second SIGINT or SIGTERM: inside C++, where gloo waits, Python's handlers of signals
never run.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time

from unishard.failures import monitor_client
from unishard.failures.monitor_server import RAISED
from unishard.failures.rank_locations import position_of, where_is

REPEATED = 1.0
"""Seconds within which a signal that comes again counts once: a terminal and torchrun both pass on a Ctrl-C."""
_HANDLED = 0.5
"""Seconds after which the main thread has run the handler of a signal, if it can."""

_installed = False


def install() -> None:
    """Watch the signals of this process from now on. Does nothing outside the main thread, or where another library
    reads them, as asyncio does.
    """
    global _installed
    if _installed or threading.current_thread() is not threading.main_thread():
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
        return
    _installed = True
    os.register_at_fork(after_in_child=_forget)
    threading.Thread(
        target=_listen, args=(reading, threading.get_ident()), name="unishard-signals", daemon=True
    ).start()


def _forget() -> None:
    with contextlib.suppress(ValueError):  # not the main thread
        signal.set_wakeup_fd(-1)


def _listen(reading: int, thread: int) -> None:
    first: dict[int, tuple[float, tuple[int, ...]]] = {}
    """By signal, when it came, and where the main thread then stood."""
    while True:
        for number in os.read(reading, 64):
            if number not in (signal.SIGINT, signal.SIGTERM):
                continue
            now = time.monotonic()
            when, position = first.get(number, (now, ()))
            if now - when >= REPEATED and position == position_of(thread):
                _end(number, thread)
            if now - when >= REPEATED or number not in first:
                select.select([], [], [], _HANDLED)
                first[number] = now, position_of(thread)


def _end(number: int, thread: int) -> None:
    """End this process, and tell the other ranks."""
    monitor = monitor_client.current()
    place = "" if monitor is None else monitor.place()
    where = place.removeprefix("is ") if place.startswith("is in ") else f"at {where_is(thread).text}"
    text = f"was stuck {where}, and was ended by a second {signal.Signals(number).name}"
    who = f"rank {monitor.rank} of {monitor.size}" if monitor is not None else "this process"
    sys.stderr.write(f"unishard: {who} {text}\n")
    sys.stderr.flush()
    if monitor is not None:
        monitor.end(text, RAISED)
        monitor.printed()
    os._exit(128 + number)
