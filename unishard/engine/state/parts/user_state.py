"""The user's own state, from `engine.save(state=...)`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from unishard.checkpoint import tensor_names
from unishard.checkpoint.hashing import hash_of
from unishard.checkpoint.user_state import by_rank, pack, ranks_in
from unishard.config.describe import count_of
from unishard.distributed.on_ranks import on_all, ranks_of
from unishard.engine.state.part import CheckpointSource, Part, Saved, of_all_ranks, whole


class UserState(Part):
    """Rank 0's is saved, or that of every rank where they differ."""

    def __init__(self, state: Any = None) -> None:
        """To save a state."""
        self.value = state
        """This rank's: what is saved, or was loaded."""

    def saved(self, group: dist.ProcessGroup) -> Saved:
        """As in `Part`."""
        rank = dist.get_rank()
        packed, tensors = on_all(group, lambda: pack(self.value))
        digests = ranks_of(group).gather(None if self.value is None else _digest(packed, tensors))
        first, *_ = digests
        if all(digest == first or (digest is None and first) for digest in digests):
            return Saved({} if rank else whole(tensors), {"state": packed})
        packed, tensors = pack(self.value, f"{tensor_names.STATE}rank{rank:05d}.")
        return Saved(whole(tensors), {"state": by_rank(of_all_ranks(packed, group))})

    def check(self, source: CheckpointSource) -> None:
        """As in `Part`."""
        states = ranks_in(source.manifest.state)
        of_rank = dist.get_rank() if states and len(states) == dist.get_world_size() else 0
        self.value = source.unpack(states[of_rank] if states else source.manifest.state)

    def resume(self, source: CheckpointSource, group: dist.ProcessGroup) -> Iterator[str]:
        """As in `Part`."""
        states = ranks_in(source.manifest.state)
        if states and len(states) != dist.get_world_size():
            yield f"{count_of(len(states), 'rank')} saved a different `state` each; every rank gets that of rank 0"


def _digest(packed: Any, tensors: Mapping[str, Tensor]) -> str:
    content = [packed, {name: hash_of(tensor) for name, tensor in tensors.items()}]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
