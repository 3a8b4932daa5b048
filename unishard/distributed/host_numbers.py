"""Reduces a few whole numbers of the hosts over gloo: nothing waits for a device, and no device waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.distributed import process_group
from unishard.distributed.process_group import host_group


def total(number: int) -> int:
    """The sum over all ranks. Collective."""
    return start_total(number)()


def start_total(number: int) -> Callable[[], int]:
    """Start to add up a number over all ranks; what is returned waits for the sum.

    Collective, and the second call is not.
    """
    wait = _start([number], dist.ReduceOp.SUM)
    return lambda: wait()[0]


def largest(numbers: Sequence[int]) -> list[int]:
    """The largest of each number over all ranks. Collective."""
    return _start(numbers, dist.ReduceOp.MAX)()


def _start(numbers: Sequence[int], operation: dist.ReduceOp.RedOpType) -> Callable[[], list[int]]:
    if dist.get_world_size() == 1:
        return lambda: list(numbers)
    tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    group = None if process_group.of_numbers().type == "cpu" else host_group()
    work = dist.all_reduce(tensor, operation, group=group, async_op=True)

    def wait() -> list[int]:
        work.wait()
        reduced: list[int] = tensor.tolist()
        return reduced

    return wait


# -- A number that the device computes and the host reads later, without stopping the device's queue --


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
