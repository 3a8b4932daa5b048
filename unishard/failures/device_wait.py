"""Whether this rank's device waits in a collective that the host waits for.

A collective of NCCL returns at once. The host waits later, where it reads a number from the device; that call of a
tensor has no frame of its own, and looks the same as a long computation. Two events tell them apart: the device has
reached the collectives, and has not finished them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class DeviceWait:
    """A wait that begins now and ends at `end`, or once the host has read the results of the collectives.

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
        """Record another event behind the collectives. The host goes on, and may wait for the device later."""
        self._through = self._stream.record_event()

    def holds(self) -> bool:
        """Whether the device is between the two now; no collective that all ranks join takes it long."""
        try:
            with self._guard():
                return bool(self._reached.query() and not (self._through or self._stream).query())
        except RuntimeError:  # an error on the device, which the thread that waits for it raises
            return False
