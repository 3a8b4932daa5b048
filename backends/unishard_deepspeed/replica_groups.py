"""Groups of ranks that hold a copy each, which DeepSpeed 0.19.8 no longer has since MiCS was taken out.

ZeRO divides between the ranks of the data-parallel group that it is given. Here that is the group of ranks that share one copy;
the gradients are averaged over the groups before the update. DeepSpeed takes ranks at the same place of different groups for
model-parallel ones, so that it counts each part of the gradients once in the norm.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from unishard.config import Config
from unishard.config.shard_groups import shard_group_size
from unishard.config.topology import Topology

__all__ = ["Replicas", "replicas_of"]


class Replicas:
    """What `deepspeed.initialize` takes as `mpu` (DeepSpeed 0.19.8, `__init__.py`)."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    @property
    def count(self) -> int:
        """Groups that hold a copy each."""
        return self._mesh.size(0)

    def get_data_parallel_group(self) -> Any:
        """The ranks that share one copy."""
        return self._mesh.get_group("shard")

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Their numbers among all ranks."""
        return dist.get_process_group_ranks(self.get_data_parallel_group())

    def get_data_parallel_world_size(self) -> int:
        """How many they are."""
        return self._mesh.size(1)

    def get_data_parallel_rank(self) -> int:
        """This rank among them."""
        return self._mesh.get_local_rank("shard")

    def get_model_parallel_group(self) -> Any:
        """The ranks that hold the same part."""
        return self._mesh.get_group("replicate")

    def get_model_parallel_world_size(self) -> int:
        """How many they are."""
        return self.count

    def get_model_parallel_rank(self) -> int:
        """This rank among them."""
        return self._mesh.get_local_rank("replicate")


def replicas_of(cfg: Config, topology: Topology, device: str) -> Replicas | None:
    """The groups that a config asks for; None where all ranks share one copy. Collective."""
    size = shard_group_size(cfg, topology)
    if not cfg.sharding.hybrid or size == topology.world_size:
        return None
    shape = (topology.world_size // size, size)
    return Replicas(init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")))
