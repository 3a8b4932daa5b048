"""Tensors that lie in pieces in several files, as stretches that are put together where they are read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unishard.checkpoint.lazy_shards import LazyShard
from unishard.errors import CheckpointError

__all__ = ["constant", "stitched", "whole"]


def stitched(name: str, shape: Sequence[int], pieces: Sequence[Tensor]) -> LazyShard:
    """A tensor of flat pieces, one after the other, with less than one element of padding for each piece at the end.

    Raises:
        CheckpointError: The pieces are not enough, or too many.
    """
    size, numel, starts, at = torch.Size(shape), torch.Size(shape).numel(), [], 0
    for piece in pieces:
        starts.append(at)
        at += piece.numel()
    if not 0 <= at - numel < max(1, len(pieces)):
        raise CheckpointError(f"{name}: the files hold {at} of its {numel} elements; files are missing, or of different checkpoints")

    def read(begin: int, end: int) -> Tensor:
        values = torch.empty(end - begin, dtype=pieces[0].dtype)
        for start, piece in zip(starts, pieces, strict=True):
            low, high = max(begin, start), min(end, start + piece.numel())
            if low < high:
                values[low - begin : high - begin] = piece[low - start : high - start]
        return values

    return LazyShard(size, pieces[0].dtype if pieces else torch.float32, 0, numel, read)


def whole(values: Tensor) -> LazyShard:
    """A tensor that lies in one piece."""
    return LazyShard(values.shape, values.dtype, 0, values.numel(), lambda begin, end: values.reshape(-1)[begin:end].clone())


def constant(value: float | Tensor) -> LazyShard:
    """A number, fp32."""
    return whole(torch.tensor(float(value), dtype=torch.float32))
