"""Full weights one after the other, read a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.checkpoint.export.plan import ExportedTensor
from unishard.distributed.lazy_shards import LazyShard, lazy_shard_of
from unishard.distributed.shards import Shard
from unishard.engine.state.full_tensors import buffer_bytes, full_tensors
from unishard.engine.state.merged_adapters import MergedAdapters


def stream_weights(
    wanted: Iterable[ExportedTensor],
    shards: Mapping[str, Shard],
    device: torch.device,
    bucket_bytes: int,
    merged: MergedAdapters | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Name and full tensor of each, one collective for a bucket. Collective.

    Args:
        wanted: The same on all ranks.
        shards: This rank's shard of every tensor of the model, by name.
        device: Of the full tensors.
        bucket_bytes: Most bytes of the buffers that are in use, unless a single tensor is larger. A loop holds the
            last tensor of one while the next is read, so each has half of it.
        merged: Adapters to add to the weights that they change: one further collective for the adapters of a bucket.

    Yields:
        Views of the buffer of their bucket, which is freed with the last of them.
    """
    held = {name: lazy_shard_of(shard) for name, shard in shards.items()}
    shown = held if merged is None else merged.shown(held)
    for bucket in _buckets(wanted, shards, bucket_bytes // 2):
        changed = {}
        if merged is not None:
            needed = merged.needed_for(bucket.sources)
            whole = [_whole(name, held[name]) for name in needed]
            full = dict(stream_weights(whole, shards, device, bucket_bytes))
            changed = {name: merged.added_to(name, shown[name], full) for name in bucket.sources}
        tensors = full_tensors(bucket.tensors, {**held, **changed}, bucket.group, device)
        names = [tensor.name for tensor in bucket.tensors]
        while tensors:
            yield names.pop(0), tensors.pop(0)


def _whole(name: str, shard: LazyShard) -> ExportedTensor:
    """A tensor of the model as it is, in fp32 if it is floating-point."""
    dtype = torch.float32 if shard.dtype.is_floating_point else shard.dtype
    return ExportedTensor(name, name, tuple(shard.shape), dtype)


@dataclass
class _Bucket:
    """Tensors that one collective makes full."""

    group: dist.ProcessGroup | None
    """The ranks that have parts of them; None if each rank has them in full."""
    tensors: list[ExportedTensor] = field(default_factory=list)
    size: int = 0
    """Bytes of its buffer."""

    @property
    def sources(self) -> list[str]:
        """The tensors of the model that are read."""
        return [part.source for tensor in self.tensors for part in tensor.parts or (tensor,)]


def _buckets(wanted: Iterable[ExportedTensor], shards: Mapping[str, Shard], most: int) -> Iterator[_Bucket]:
    """Fill a bucket of at most so many bytes for each group of ranks, in the order of the tensors."""
    filling: dict[dist.ProcessGroup | None, _Bucket] = {}
    for tensor in wanted:
        group, size = shards[tensor.source].group, buffer_bytes(tensor)
        if group in filling and filling[group].size + size > most:
            yield filling.pop(group)
        bucket = filling.setdefault(group, _Bucket(group))
        bucket.tensors.append(tensor)
        bucket.size += size
    yield from filling.values()
