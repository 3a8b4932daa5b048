"""A shard of a tensor to be stored, with a function that reads any range of it on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from unishard.distributed.shards import Shard, flat


class LazyShard(NamedTuple):
    """The flat range of a tensor that a rank or a file holds. Nothing is read until `read` is called."""

    shape: torch.Size
    """Of the full tensor."""
    dtype: torch.dtype
    start: int
    """First element, in the flattened full tensor."""
    end: int
    """One past the last element; equal to `start` for an empty shard."""
    read: Callable[[int, int], Tensor]
    """Returns the elements between two offsets of the flattened full tensor, both within the shard: flat, contiguous,
    on any device."""

    @property
    def interval(self) -> range:
        """The elements of the flattened full tensor."""
        return range(self.start, self.end)


def lazy_shard_of(part: Shard) -> LazyShard:
    """This rank's shard of a live tensor.

    Its memory is read when it is written to a file, not now, unless it is not contiguous.
    """
    values = flat(part.values)
    start, stop = part.interval.start, part.interval.stop
    return LazyShard(part.shape, values.dtype, start, stop, lambda begin, end: values[begin - start : end - start])
