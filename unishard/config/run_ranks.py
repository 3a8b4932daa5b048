"""How many ranks a run of a config has, before it is started, and what says so. Imports neither torch nor an engine."""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

from unishard.config import Config
from unishard.config.batch_sizes import ranks_of_batch
from unishard.config.data_share import shared_by
from unishard.config.describe import count_of
from unishard.config.topology import Topology


class RunRanks(NamedTuple):
    """The ranks of a run."""

    topology: Topology
    origin: str
    """The field or option that says how many; empty if nothing does, and one rank is assumed."""

    @property
    def given(self) -> bool:
        """Whether an option of the command line says how many."""
        return self.origin.startswith("--")

    def __str__(self) -> str:
        ranks, nodes = self.topology.world_size, self.topology.world_size // self.topology.local_world_size
        number = count_of(ranks, "rank") + (f" ({count_of(nodes, 'node')})" if nodes > 1 else "")
        return f"{number}, as {self.origin} says" if self.origin and not self.given else number


def ranks_of(cfg: Config, world_size: int | None = None, per_node: int | None = None) -> RunRanks:
    """The number of ranks that options of the command line give, or else the config implies.

    Args:
        cfg: The config.
        world_size: `--world-size`.
        per_node: `--gpus-per-node`, which divides `world_size`.

    Raises:
        ConfigError: No number of ranks gives the global batch size.
    """
    nodes, processes = cfg.launch.max_nodes, per_node or cfg.launch.processes_per_node
    if world_size is not None:
        return RunRanks(_nodes_of(world_size, processes), "--world-size")
    if processes is not None:
        return RunRanks(Topology(processes * nodes, processes), "--gpus-per-node" if per_node else "launch")
    if (implied := ranks_of_batch(cfg.training)) is not None:
        implied *= cfg.parallel.sharing
        return RunRanks(_nodes_of(implied, implied // nodes), "training.global_batch_size")
    if cfg.sharding.hybrid and cfg.sharding.group_size:
        return RunRanks(Topology(cfg.sharding.group_size, cfg.sharding.group_size), "sharding.group_size")
    parallel = cfg.parallel
    if (size := lcm(parallel.sharing, parallel.expert.size)) > 1:
        fields = shared_by(parallel.sequence.size, parallel.tensor.size) if parallel.sharing > 1 else ""
        return RunRanks(Topology(size, size), fields if size == parallel.sharing else "parallel.expert.size")
    if nodes > 1:
        return RunRanks(Topology(nodes, 1), "launch.nodes")
    return RunRanks(Topology(), "")


def _nodes_of(ranks: int, per_node: int | None) -> Topology:
    """Ranks on nodes of a size; on one node where they do not fill several."""
    return Topology(ranks, per_node if per_node and ranks % per_node == 0 else ranks)
