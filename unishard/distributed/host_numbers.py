"""Reduces a few whole numbers of the hosts over gloo: nothing waits for a device, and no device waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from unishard.distributed import devices
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


def largest(numbers: Sequence[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """The largest of each number over the ranks of a group with a CPU backend, by default all ranks. Collective."""
    return _start(numbers, dist.ReduceOp.MAX, group)()


def _start(
    numbers: Sequence[int], operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None
) -> Callable[[], list[int]]:
    if dist.get_world_size(group) == 1:
        return lambda: list(numbers)
    tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if group is None and devices.of_numbers().type != "cpu":
        group = host_group()
    work = dist.all_reduce(tensor, operation, group=group, async_op=True)

    def wait() -> list[int]:
        work.wait()
        reduced: list[int] = tensor.tolist()
        return reduced

    return wait
