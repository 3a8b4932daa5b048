"""Automatic saves: after a number of updates or minutes, and on a signal."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from unishard import config
from unishard.distributed import host_numbers
from unishard.errors import ContractError
from unishard.failures import launcher
from unishard.failures.second_signal import REPEATED

EXIT_CODE = 85
"""Exit code of a process that saved because of a signal, so that its launcher can tell this from a failure."""

_TIME, _SIGNAL = 1, 2

_logger = logging.getLogger("unishard")


class Cause(NamedTuple):
    """Why a save is due."""

    text: str
    ends: bool
    """Whether the process ends after the save."""


class Autosave:
    """Decides when to save, from the updates, the clock and signals.

    All ranks decide alike, even if only one got a signal.
    """

    def __init__(self, cfg: config.Checkpoint) -> None:
        """Start the clock and install signal handlers.

        Args:
            cfg: The section `checkpoint`.

        Raises:
            ContractError: `on_signal` is set and this is not the main thread, the only one that receives signals in
                Python.
        """
        self._every, self._seconds = cfg.every_steps, None if cfg.every_minutes is None else 60 * cfg.every_minutes
        self._began = time.monotonic()
        self._caught, self._caught_at = 0, 0.0
        self._saving = False
        """Whether the save because of a signal has begun."""
        self._former: dict[int, Any] = {}
        self._closed = False
        if cfg.on_signal and threading.current_thread() is not threading.main_thread():
            raise ContractError(
                "checkpoint.on_signal: Python delivers signals only to the main thread; call prepare there, or remove "
                "this field"
            )
        for name in cfg.on_signal:
            number = signal.Signals[name]
            self._former[number] = former = signal.signal(number, self._catch)
            launcher.saving.append(number)
            if _is_users(former):
                _say("%s had a handler, %s, which is not called while this engine is open", number, former)
        self._watched = set(self._former)
        """The signals whose handlers are still this one, or that of another engine."""

    def due(self, updates: int) -> Cause | None:
        """Decide whether to save now.

        Collective if `every_minutes` or `on_signal` is set: the hosts reduce two numbers.

        Args:
            updates: The number of updates made.
        """
        for number in tuple(self._watched):
            if not _is_users(signal.getsignal(number)):
                continue
            self._watched.discard(number)
            _say(
                "%s has another handler since prepare, %s: a save follows only if that calls the one before it, which "
                "signal.signal returned",
                number,
                signal.getsignal(number),
            )
        code = self._agreed() if self._seconds is not None or self._former else 0
        if code & _SIGNAL:
            self._saving = True
            return Cause("a signal to this rank" if self._caught else "a signal to another rank", ends=True)
        if self._every is not None and updates % self._every == 0:
            return Cause(f"checkpoint.every_steps = {self._every}", ends=False)
        return Cause("checkpoint.every_minutes", ends=False) if code & _TIME else None

    def saved(self) -> None:
        """Restart the clock after a save."""
        self._began = time.monotonic()

    def close(self) -> None:
        """Restore the previous signal handlers; engines created later then pass signals to the handler before this
        one.
        """
        self._closed = True
        for number, former in self._former.items():
            launcher.saving.remove(number)
            if signal.getsignal(number) == self._catch:
                signal.signal(number, _open(number, former))

    def _agreed(self) -> int:
        late = self._seconds is not None and dist.get_rank() == 0 and time.monotonic() - self._began >= self._seconds
        time_is_up, signaled = host_numbers.largest([int(late), int(bool(self._caught))])
        return time_is_up * _TIME + signaled * _SIGNAL

    def _catch(self, number: int, frame: FrameType | None) -> None:
        now, again = time.monotonic(), self._caught == number and not self._saving
        if again and now - self._caught_at >= REPEATED:
            self._give_way(number)
            return
        if not again:
            self._caught, self._caught_at = number, now
        former = _open(number, self._former[number])
        if isinstance(getattr(former, "__self__", None), Autosave):
            former(number, frame)  # the handler of another engine, which saves too if its update ends first

    def _give_way(self, number: int) -> None:
        """Let a signal that comes again do what it does without this handler: end a process whose update never ends."""
        handler = self._former[number]
        while isinstance(owner := getattr(handler, "__self__", None), Autosave):
            handler = owner._former[number]
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.kill(os.getpid(), number)


def _is_users(handler: Any) -> bool:
    """Whether a handler of a signal is neither Python's nor of an engine."""
    ours = isinstance(getattr(handler, "__self__", None), Autosave)
    return callable(handler) and handler is not signal.default_int_handler and not ours


def _say(text: str, number: int, handler: Any) -> None:
    if dist.get_rank() == 0:
        name = getattr(handler, "__qualname__", None) or repr(handler)
        _logger.warning(f"checkpoint.on_signal: {text}", signal.Signals(number).name, name)


def _open(number: int, handler: Any) -> Any:
    """The handler, or the one before it if it belongs to a closed engine."""
    while isinstance(owner := getattr(handler, "__self__", None), Autosave) and owner._closed:
        handler = owner._former[number]
    return handler
