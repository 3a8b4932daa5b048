"""A tensor that is to be stored, before anything of it is read: a stretch of it, and a function that fetches any piece of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from unishard.distributed.shards import Shard

__all__ = ["LazyShard", "lazy_shard_of"]


class LazyShard(NamedTuple):
    """What somebody (a rank, a file) holds of a tensor. Nothing is read until `read` is called."""

    shape: torch.Size
    """Of the whole tensor."""
    dtype: torch.dtype
    start: int
    """Where it begins in the flattened whole."""
    end: int
    """One beyond its last element; `start` where nothing is held."""
    read: Callable[[int, int], Tensor]
    """The elements from one place of the flattened whole to another, both within the stretch: flat, contiguous, on any device."""


def lazy_shard_of(part: Shard) -> LazyShard:
    """What this rank holds of a live tensor. The memory is read when it is written to a file, not now."""
    flat = part.values.detach().reshape(-1)
    start = 0 if part.group is None else part.start
    return LazyShard(part.shape, flat.dtype, start, start + flat.numel(), lambda begin, end: flat[begin - start : end - start])
