"""What a part of a checkpoint is: one kind of state, which saves, checks and restores itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from unishard.checkpoint.manifest import Manifest
from unishard.checkpoint.tensor_reader import Tensors
from unishard.checkpoint.user_state import once, unpack
from unishard.distributed.lazy_shards import LazyShard, lazy_shard_of
from unishard.distributed.shards import Shard


class Saved(NamedTuple):
    """What this rank saves of a part."""

    shards: Mapping[str, LazyShard]
    """By checkpoint name."""
    facts: Mapping[str, Any]
    """Fields of the manifest. Only rank 0's are used."""


class CheckpointSource(NamedTuple):
    """A checkpoint to load, and how."""

    folder: Path
    manifest: Manifest
    tensors: Tensors
    unpack: Callable[[Any], Any]
    """Decodes a state of the manifest; reads each of its tensors once."""
    strict: bool
    """Whether everything must match."""
    data: bool
    """Whether the next training loader continues at the checkpoint's data position."""

    @property
    def same_ranks(self) -> bool:
        """Whether as many ranks saved it."""
        return self.manifest.world_size == dist.get_world_size()

    def full(self, prefix: str) -> dict[str, Tensor]:
        """The whole tensors whose names begin so, by the rest of their names.

        Raises:
            CheckpointError: One cannot be read.
        """
        names = [name for name in self.tensors if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.tensors.full(name) for name in names}


class Part:
    """One kind of state. A load calls `check` of all parts, then `read` of all, then `resume` of all.

    `check` and `read`, which may fail on one rank, make no collective call.
    """

    def saved(self, group: dist.ProcessGroup) -> Saved:
        """What this rank saves. Collective.

        Args:
            group: All ranks, on the host.

        Raises:
            CheckpointError: On every rank: it cannot be saved.
        """
        return Saved({}, {})

    def check(self, source: CheckpointSource) -> None:
        """Check that the run can resume from a checkpoint. Changes nothing.

        Raises:
            CheckpointError: It cannot.
        """

    def read(self, source: CheckpointSource) -> None:
        """Read what this rank holds.

        Raises:
            CheckpointError: It cannot be read, or has not been checked before.
        """

    def resume(self, source: CheckpointSource, group: dist.ProcessGroup) -> Iterator[str]:
        """Go on from what was checked and read. Collective.

        Args:
            source: The checkpoint.
            group: All ranks, on the host.

        Yields:
            Notes about what differs from the checkpoint.
        """
        yield from ()


def source_of(folder: Path, manifest: Manifest, *, strict: bool, data: bool) -> CheckpointSource:
    """Open the tensors of a checkpoint.

    Raises:
        CheckpointError: Its index cannot be read.
    """
    tensors = Tensors(folder)
    read = once(tensors.full)
    return CheckpointSource(folder, manifest, tensors, lambda packed: unpack(packed, read), strict, data)


def lazy(shards: Mapping[str, Shard]) -> dict[str, LazyShard]:
    """Those with elements, to be written."""
    return {name: lazy_shard_of(shard) for name, shard in shards.items() if shard.shape.numel()}


def whole(tensors: Mapping[str, Tensor]) -> dict[str, LazyShard]:
    """Tensors that only this rank writes."""
    return lazy({name: Shard(tensor.shape, tensor) for name, tensor in tensors.items()})


def of_all_ranks(fact: Any, group: dist.ProcessGroup) -> list[Any]:
    """That of each rank, for the manifest, on rank 0; empty on the others. Collective."""
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(fact, everyone, group=group, group_dst=0)
    return everyone or []
