"""A training whose loop is a framework's, made to wait after each update: it runs in a thread of its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

__all__ = ["Pause", "Paused", "Profile"]

Pause = Callable[[Tensor], None]
"""Called in the training after each update, with the mean loss of this rank's micro-batches."""
Profile = Callable[[FrameType, str, Any], object]


class Paused:
    """Goes on with a training for one update at a time. Two of them take turns, so only one thread ever runs."""

    def __init__(self, train: Callable[[Pause], None]) -> None:
        """Start nothing yet: the first step prepares everything."""
        self._train = train
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._begins, self._ended = threading.Semaphore(0), threading.Semaphore(0)
        self._profile: Profile | None = None
        self._loss: Tensor | None = None
        self._error: BaseException | None = None

    def step(self, profile: Profile | None = None) -> Tensor:
        """Make one update, seen by a profile function, and return its loss.

        Raises:
            RuntimeError: The training has ended.
        """
        if not self._thread.ident:
            self._thread.start()
        self._profile = profile
        self._begins.release()
        self._ended.acquire()
        if self._error is not None:
            raise self._error
        if self._loss is None:
            raise RuntimeError("the training has ended before it was to")
        return self._loss

    def _run(self) -> None:
        self._begins.acquire()
        torch.set_num_threads(1)
        try:
            self._train(self._pause)
        except BaseException as error:  # the thread's owner raises it
            self._error = error
        self._loss = None
        self._ended.release()

    def _pause(self, loss: Tensor) -> None:
        sys.setprofile(None)
        self._loss = loss
        self._ended.release()
        self._begins.acquire()
        sys.setprofile(self._profile)
