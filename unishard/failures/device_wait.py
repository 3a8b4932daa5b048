"""Whether this rank's device is held up in a collective that the host waits for.

A collective of NCCL returns at once, and the host waits later, where it reads a number from the device: a call of a
tensor without a frame of its own, which looks the same as a long computation. An event tells them apart: the device has
come to the collectives, and is not through with them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class DeviceWait:
    """From the moment it is made until the host has read what the collectives behind it give, or until `end`.

    Any thread may ask.
    """

    def __init__(self, stream: Any, guard: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        """Record an event on a stream, behind what has been queued before the collectives.

        Args:
            stream: A `torch.cuda.Stream`.
            guard: Makes the stream's device that of the asking thread, which would else make a context on another one.
        """
        self._stream, self._guard = stream, guard
        self._reached = stream.record_event()
        self._through: Any = None

    @classmethod
    def on(cls, device: torch.device) -> DeviceWait:
        """For the current stream of a CUDA device."""
        return cls(torch.cuda.current_stream(device), lambda: torch.cuda.device(device))

    @property
    def ended(self) -> bool:
        """Whether the host has queued what comes after the collectives."""
        return self._through is not None

    def end(self) -> None:
        """Record another event behind the collectives: the host goes on, and may wait for the device later and
        elsewhere.
        """
        self._through = self._stream.record_event()

    def holds(self) -> bool:
        """Whether the device is between the two now; no collective that all ranks join takes it long."""
        try:
            with self._guard():
                return bool(self._reached.query() and not (self._through or self._stream).query())
        except RuntimeError:  # an error on the device, which the thread that waits for it raises
            return False
