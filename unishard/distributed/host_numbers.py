"""Reduces a few whole numbers of the hosts over gloo: nothing waits for a device, and no device waits for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from unishard.distributed.process_group import device_of_numbers, host_group

__all__ = ["largest", "total"]


def total(number: int) -> int:
    """The sum over all ranks. Collective."""
    return _reduced([number], dist.ReduceOp.SUM)[0]


def largest(numbers: Sequence[int]) -> list[int]:
    """The largest of each number over all ranks. Collective."""
    return _reduced(numbers, dist.ReduceOp.MAX)


def _reduced(numbers: Sequence[int], operation: dist.ReduceOp.RedOpType) -> list[int]:
    if dist.get_world_size() == 1:
        return list(numbers)
    tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    dist.all_reduce(tensor, operation, group=None if device_of_numbers().type == "cpu" else host_group())
    reduced: list[int] = tensor.tolist()
    return reduced
