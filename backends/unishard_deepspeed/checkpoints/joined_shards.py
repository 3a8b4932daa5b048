"""Tensors that are sharded over several files, joined on demand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unishard.distributed.lazy_shards import LazyShard
from unishard.errors import CheckpointError


def joined(name: str, shape: Sequence[int], shards: Sequence[Tensor]) -> LazyShard:
    """A tensor that consists of consecutive flat shards, with less than one element of padding per shard at the end.

    Raises:
        CheckpointError: The shards have too few or too many elements.
    """
    size, numel, starts, at = torch.Size(shape), torch.Size(shape).numel(), [], 0
    for shard in shards:
        starts.append(at)
        at += shard.numel()
    if not 0 <= at - numel < max(1, len(shards)):
        raise CheckpointError(
            f"{name}: the files hold {at} of its {numel} elements; files are missing, or belong to different "
            "checkpoints"
        )

    def read(begin: int, end: int) -> Tensor:
        values = torch.empty(end - begin, dtype=shards[0].dtype)
        for start, shard in zip(starts, shards, strict=True):
            low, high = max(begin, start), min(end, start + shard.numel())
            if low < high:
                values[low - begin : high - begin] = shard[low - start : high - start]
        return values

    return LazyShard(size, shards[0].dtype if shards else torch.float32, 0, numel, read)


def in_memory(values: Tensor) -> LazyShard:
    """A tensor that is not sharded."""
    return LazyShard(
        values.shape, values.dtype, 0, values.numel(), lambda begin, end: values.reshape(-1)[begin:end].clone()
    )


def constant(value: float | Tensor) -> LazyShard:
    """A number as an fp32 tensor."""
    return in_memory(torch.tensor(float(value), dtype=torch.float32))
