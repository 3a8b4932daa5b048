"""The second copy of the parameters that stage 3 keeps in smaller groups of ranks (hpZ), so that backward gathers only
there.

The first forward of a window gathers among all ranks. A unit's release leaves a shard of it on each rank of a group,
and every later gather of the window takes these; the update drops them (DeepSpeed 0.19.8,
runtime/zero/partition_parameters.py, _partition_param_sec). Imports neither torch nor deepspeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unishard.config import Config
from unishard.config.topology import Topology
from unishard.errors import Problem
from unishard_deepspeed.fields import stage

_KEY = "zero_hpz_partition_size"


def group_of(zero: Mapping[str, Any], ranks: int) -> int | None:
    """The ranks that hold a second copy together; None if there is none.

    Args:
        zero: The block `zero_optimization`.
        ranks: Ranks that share the first copy; a group of as many would gather no less.
    """
    size = int(zero.get(_KEY, 1))
    return size if zero["stage"] == 3 and 1 < size < ranks else None


def second_copy_problems(cfg: Config, own: Mapping[str, Any], topology: Topology) -> Iterator[Problem]:
    """Why the config cannot have the groups that `native.deepspeed` asks for.

    Args:
        cfg: The config.
        own: Its `native.deepspeed`, checked key by key.
        topology: The ranks.
    """
    zero = own.get("zero_optimization", {})
    size = zero.get(_KEY, 1) if isinstance(zero, Mapping) else 1
    refusal = _refusal(cfg, size, topology.world_size) if isinstance(size, int) and _KEY in zero else ""
    if refusal:
        yield Problem(f"native.deepspeed.zero_optimization.{_KEY}", refusal)


def _refusal(cfg: Config, size: int, world: int) -> str:
    if cfg.sharding.hybrid:
        return (
            f"makes groups of its own beside those of {cfg.sharding.strategy}; remove it, or set sharding.strategy "
            "to full_shard"
        )
    if slices := cfg.parallel.slices:
        return f"keeps parts on neighboring ranks, which have different slices with {slices}; remove it"
    if cfg.sharding.reshard_group is not None:
        return (
            f"is decided by sharding.reshard_after_forward, which is {cfg.sharding.reshard_group}; remove one of "
            "the two"
        )
    if size < 2 or stage(cfg) != 3:
        return ""
    if size < world and world % size:
        fitting = ", ".join(str(number) for number in range(2, world) if world % number == 0)
        return f"is {size}, which does not divide the {world} ranks; write {f'{fitting} or 1' if fitting else 1}"
    return ""
