"""The number of ranks that share one copy of the training state. Imports neither torch nor an engine."""

from __future__ import annotations

from math import gcd

from unishard.config import Config
from unishard.config.describe import count_of
from unishard.config.topology import Topology
from unishard.errors import ConfigError, Problem


def shard_group_size(cfg: Config, topology: Topology) -> int:
    """The number of ranks that share one copy: 1 for `no_shard`, the group size for hybrid strategies, else all."""
    if cfg.sharding.strategy == "no_shard":
        return 1
    if not cfg.sharding.hybrid:
        return topology.world_size
    return cfg.sharding.group_size or topology.local_world_size


def check_groups(cfg: Config, topology: Topology) -> None:
    """Check that groups of ranks fit the topology.

    Raises:
        ConfigError: `sharding.group_size`, or its default from the node, does not divide the ranks, or is 1; or
            `sharding.reshard_after_forward` is a number that does not divide the ranks that share one copy, or have the
            same slices; or `parallel.expert.size` or `parallel.tensor.size` does not divide the ranks, or those that
            share one copy.
    """
    require_divides("parallel.expert.size", cfg.parallel.expert.size, topology)
    require_divides("parallel.tensor.size", cfg.parallel.tensor.size, topology)
    _check_slices(cfg, topology)
    _check_reshard_group(cfg, topology)
    if not cfg.sharding.hybrid:
        return
    world, size = topology.world_size, shard_group_size(cfg, topology)
    message = f"is {size}" if cfg.sharding.group_size else f"is not set, and a node has {count_of(size, 'rank')}"
    if world % size:
        fitting = [str(number) for number in range(2, world + 1) if world % number == 0]
        instead = f"write one of {', '.join(fitting)}" if fitting else "choose full_shard"
        raise ConfigError(
            [Problem("sharding.group_size", f"{message}, which does not divide {count_of(world, 'rank')}; {instead}")]
        )
    if size == 1 < world:
        raise ConfigError(
            [
                Problem(
                    "sharding.group_size",
                    f"{message}, so nothing would be sharded; write 2 or more, or choose full_shard or no_shard",
                )
            ]
        )


def require_divides(field: str, size: int, topology: Topology) -> None:
    """Check that the size of a group divides the ranks.

    Raises:
        ConfigError: It does not.
    """
    world = topology.world_size
    if world % size:
        fitting = [str(number) for number in range(2, world + 1) if world % number == 0]
        instead = f"write {' or '.join(fitting)}, or start another number of ranks" if fitting else "start more ranks"
        message = f"is {size}, which does not divide {count_of(world, 'rank')}; {instead}"
        raise ConfigError([Problem(field, message)])


def _check_slices(cfg: Config, topology: Topology) -> None:
    shared = shard_group_size(cfg, topology)
    for name, section in (("expert", cfg.parallel.expert), ("tensor", cfg.parallel.tensor)):
        if cfg.sharding.hybrid and shared % section.size:
            message = (
                f"is {section.size}, which does not divide the {shared} ranks that share one copy; write a size that "
                "does, or set sharding.strategy to full_shard"
            )
            raise ConfigError([Problem(f"parallel.{name}.size", message)])


def _check_reshard_group(cfg: Config, topology: Topology) -> None:
    kept, shared = cfg.sharding.reshard_group, shard_group_size(cfg, topology)
    size = gcd(*(max(1, shared // each.size) for each in (cfg.parallel.expert, cfg.parallel.tensor)))
    if kept is None or shared == 1 or size % kept == 0:
        return
    fitting = [str(number) for number in range(2, size) if size % number == 0]
    instead = f"write {', '.join([*fitting, 'true'])} or false"
    of = f"have the same slices ({cfg.parallel.slices})" if cfg.parallel.slices else "share one copy"
    message = f"is {kept}, which does not divide the {size} ranks that {of}; {instead}"
    raise ConfigError([Problem("sharding.reshard_after_forward", message)])
