"""Ctrl-C and exits while the ranks work together: none of them leaves the others waiting in a collective."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred() -> Iterator[None]:
    """Call the Python handlers of SIGINT and SIGTERM only after the block; if the signal comes a second time, at once.

    A handler may raise, as that of Ctrl-C does, and the other ranks would wait in the next collective of the block.
    """
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals only there
        yield
        return
    former: dict[int, Callable[[int, FrameType | None], Any]] = {}
    caught: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if number in caught:
            caught.remove(number)
            former[number](number, frame)
        else:
            caught.append(number)

    for signal_number in _SIGNALS:
        handler = signal.getsignal(signal_number)
        if callable(handler):
            former[signal_number] = handler
            signal.signal(signal_number, hold)
    try:
        yield
    finally:
        for number, handler in former.items():
            if signal.getsignal(number) is hold:
                signal.signal(number, handler)
        for number in caught:
            former[number](number, None)


def share(error: BaseException) -> BaseException:
    """Mark an interrupt of this rank that all other ranks know of, so that they all leave a collective call
    together.
    """
    error.shared = True  # type: ignore[attr-defined]
    return error


def is_shared(error: BaseException) -> bool:
    """Whether all other ranks have heard of this interrupt."""
    return getattr(error, "shared", False)
