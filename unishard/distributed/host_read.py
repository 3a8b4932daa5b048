"""A number that the device computes and the host reads later, without stopping the device's queue."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostRead:
    """Copies a number to pinned host memory behind what is queued now; `get` waits for that copy, and not for what is
    queued after it.
    """

    def __init__(self, value: Tensor) -> None:
        """Queue the copy; does not wait.

        Args:
            value: One element on any device; or several, for `all`.
        """
        value = value.detach()
        self._event: Any = None
        self._number: float | None = None
        if value.device.type == "cuda":
            self._host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
            self._host.copy_(value, non_blocking=True)
            self._event = torch.cuda.current_stream(value.device).record_event()
        else:
            self._host = value.clone()

    def get(self) -> float:
        """The number. The first call waits for the device, unless it is there already."""
        if self._number is None:
            self._wait()
            self._number = self._host.item()
        return self._number

    def all(self) -> list[Any]:
        """All elements, as numbers; waits like `get`."""
        self._wait()
        numbers: list[Any] = self._host.tolist()
        return numbers

    def _wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
