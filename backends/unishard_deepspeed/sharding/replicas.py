"""Groups of ranks that each hold a copy (hybrid sharding), which DeepSpeed 0.19.8 lacks since MiCS was removed.

ZeRO shards over the ranks of the data-parallel group that it gets: here the ranks that share one copy. Gradients are
averaged over the groups before the update. DeepSpeed treats ranks at the same position of different groups as
model-parallel, so it counts each gradient shard once in the norm.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from unishard.distributed.process_group import mesh_of_ranks


class Replicas:
    """The argument `mpu` of `deepspeed.initialize` (DeepSpeed 0.19.8, `__init__.py`)."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    @property
    def count(self) -> int:
        """Number of groups that each hold a copy."""
        return self._mesh.size(0)

    def get_data_parallel_group(self) -> Any:
        """The ranks that share one copy."""
        return self._mesh.get_group("shard")

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Their global ranks."""
        return dist.get_process_group_ranks(self.get_data_parallel_group())

    def get_data_parallel_world_size(self) -> int:
        """Size of that group."""
        return self._mesh.size(1)

    def get_data_parallel_rank(self) -> int:
        """This rank's index in that group."""
        return self._mesh.get_local_rank("shard")

    def get_model_parallel_group(self) -> Any:
        """The ranks that hold the same shard."""
        return self._mesh.get_group("replicate")

    def get_model_parallel_world_size(self) -> int:
        """Size of that group."""
        return self.count

    def get_model_parallel_rank(self) -> int:
        """This rank's index in that group."""
        return self._mesh.get_local_rank("replicate")


def replicas_of(shape: tuple[int, int], device: str) -> Replicas:
    """Create the groups of a hybrid strategy: so many of so many ranks. Collective."""
    return Replicas(mesh_of_ranks(device, shape, ("replicate", "shard")))
