"""When a run saves automatically: after so many updates or minutes, and when a signal asks it to end."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unishard import config
from unishard.errors import ContractError

__all__ = ["EXIT_CODE", "Autosave", "Cause"]

EXIT_CODE = 85
"""With which a process ends that saved because of a signal, so that whoever started it can tell this from a failure."""

_TIME, _SIGNAL = 1, 2


class Cause(NamedTuple):
    """Why a save is due."""

    text: str
    ends: bool
    """Whether the process is to end after it."""


class Autosave:
    """Watches the updates, the clock and the signals. All ranks decide alike, also where only one of them got a signal."""

    def __init__(self, cfg: config.Checkpoint, device: torch.device) -> None:
        """Begin to watch.

        Args:
            cfg: What to watch.
            device: Where this rank computes.

        Raises:
            ContractError: Signals are to be watched, and this is not the main thread; Python delivers signals only there.
        """
        self._device = device
        self._every, self._seconds = cfg.every_steps, None if cfg.every_minutes is None else 60 * cfg.every_minutes
        self._began = time.monotonic()
        self._caught = 0
        self._former: dict[int, Any] = {}
        self._closed = False
        if cfg.on_signal and threading.current_thread() is not threading.main_thread():
            raise ContractError(
                "checkpoint.on_signal: Python delivers signals only to the main thread; call prepare there, or leave it out"
            )
        for name in cfg.on_signal:
            number = signal.Signals[name]
            self._former[number] = signal.signal(number, self._catch)

    def due(self, updates: int) -> Cause | None:
        """Whether to save now. Collective where the clock or signals are watched: one all-reduce of one number.

        Args:
            updates: That have been made.
        """
        code = self._agreed() if self._seconds is not None or self._former else 0
        if code & _SIGNAL:
            return Cause("a signal to this rank" if self._caught else "a signal to another rank", ends=True)
        if self._every is not None and updates % self._every == 0:
            return Cause(f"checkpoint.every_steps = {self._every}", ends=False)
        return Cause("checkpoint.every_minutes", ends=False) if code & _TIME else None

    def saved(self) -> None:
        """A checkpoint was made; the minutes are counted from now."""
        self._began = time.monotonic()

    def close(self) -> None:
        """Restore the previous signal handlers; an engine created since hands signals on to the handler before this one."""
        self._closed = True
        for number, former in self._former.items():
            if signal.getsignal(number) == self._catch:
                signal.signal(number, _open(number, former))

    def _agreed(self) -> int:
        late = self._seconds is not None and dist.get_rank() == 0 and time.monotonic() - self._began >= self._seconds
        flags = torch.tensor([int(late), int(bool(self._caught))], device=self._device)
        if dist.get_world_size() > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        return int(flags[0]) * _TIME + int(flags[1]) * _SIGNAL

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught = number
        former = _open(number, self._former[number])
        if isinstance(getattr(former, "__self__", None), Autosave):
            former(number, frame)  # of another engine, which saves too if its update ends first


def _open(number: int, handler: Any) -> Any:
    """The handler, or that before it where it is one of an engine that is closed."""
    while isinstance(owner := getattr(handler, "__self__", None), Autosave) and owner._closed:
        handler = owner._former[number]
    return handler
