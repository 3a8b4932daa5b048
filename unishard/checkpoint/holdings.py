"""The intervals of tensors that one rank holds: as arrays that are short to send, and cut into the chunks of a
checkpoint.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from unishard.checkpoint import tensor_names
from unishard.distributed.dtypes import dtype_named, name_of
from unishard.distributed.lazy_shards import LazyShard
from unishard.distributed.slice_order import MEMORY_ORDER, SliceOrder

_LASTING = (tensor_names.PARAMETERS, tensor_names.OPTIMIZER, tensor_names.MATRICES, tensor_names.AVERAGES)
_FAST = 1
"""Level of zlib; names and bounds repeat so much that a higher one saves little."""


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: SliceOrder = MEMORY_ORDER
    """How its elements are counted."""

    @property
    def piece(self) -> int:
        """Elements that lie together in it; see `SliceOrder`."""
        return max(1, math.prod(self.order.piece(self.shape)))


class TensorIntervals(NamedTuple):
    """A rank's interval of each tensor, in the order in which it writes them."""

    tensors: tuple[StoredTensor, ...]
    begins: Numbers
    ends: Numbers


class Cuts(NamedTuple):
    """Intervals of at most one chunk."""

    tensor: Numbers
    """Place of its tensor in a list of tensors."""
    begins: Numbers
    ends: Numbers


def divided(shards: Mapping[str, LazyShard]) -> tuple[dict[str, LazyShard], dict[str, LazyShard]]:
    """The shards of the model, its optimizer and its average, which are the same in each save, and all others.

    The state of a random number generator, of a loader or of the user may have another length in each save.
    """
    lasting = {name: shard for name, shard in shards.items() if name.startswith(_LASTING)}
    return lasting, {name: shard for name, shard in shards.items() if name not in lasting}


def intervals_of(shards: Mapping[str, LazyShard]) -> TensorIntervals:
    """The intervals of a rank's shards."""
    tensors = tuple(StoredTensor(name, shard.dtype, tuple(shard.shape), shard.order) for name, shard in shards.items())
    bounds = np.array([(shard.start, shard.end) for shard in shards.values()], np.int64).reshape(-1, 2)
    return TensorIntervals(tensors, bounds[:, 0], bounds[:, 1])


def packed(intervals: TensorIntervals) -> tuple[bytes, bytes]:
    """Tensors and bounds to send. The first part is the same on all ranks that hold the same tensors."""
    tensors = json.dumps([(name, name_of(dtype), shape, order) for name, dtype, shape, order in intervals.tensors])
    bounds = np.stack([intervals.begins, intervals.ends]).astype("<i8").tobytes()
    return zlib.compress(tensors.encode(), _FAST), zlib.compress(bounds, _FAST)


def tensors_in(sent: bytes) -> tuple[StoredTensor, ...]:
    """The tensors of `packed`."""
    return tuple(
        StoredTensor(name, dtype_named(dtype), tuple(shape), SliceOrder(*order))
        for name, dtype, shape, order in json.loads(zlib.decompress(sent))
    )


def unpacked(tensors: tuple[StoredTensor, ...], bounds: bytes) -> TensorIntervals:
    """What `packed` was passed."""
    begins, ends = np.frombuffer(zlib.decompress(bounds), "<i8").reshape(2, -1)
    return TensorIntervals(tensors, begins, ends)


def cut(intervals: TensorIntervals, chunk: int) -> Cuts:
    """Cut intervals at the ends of pieces and at multiples of a chunk in each, so that all ranks with the same elements
    cut them alike.

    Args:
        intervals: The intervals; empty ones are left out.
        chunk: Bytes.
    """
    pieces = np.array([tensor.piece for tensor in intervals.tensors], np.int64)
    lengths = np.array([max(1, chunk // tensor.dtype.itemsize) for tensor in intervals.tensors], np.int64)
    in_piece = -(-pieces // lengths)
    before = intervals.begins // pieces * in_piece + intervals.begins % pieces // lengths
    last = intervals.ends - 1
    counts = np.where(
        intervals.ends > intervals.begins, last // pieces * in_piece + last % pieces // lengths + 1 - before, 0
    )
    tensor = np.repeat(np.arange(len(lengths)), counts)
    place = np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)  # of a cut among those of its tensor
    piece, chunks = np.divmod(before[tensor] + place, in_piece[tensor])
    first = piece * pieces[tensor] + chunks * lengths[tensor]
    until = np.minimum(first + lengths[tensor], (piece + 1) * pieces[tensor])
    return Cuts(tensor, np.maximum(first, intervals.begins[tensor]), np.minimum(until, intervals.ends[tensor]))


Numbers = NDArray[np.int64]
