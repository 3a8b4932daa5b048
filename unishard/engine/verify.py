"""After prepare: what runs is what was asked, read off the engine's live tensors, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from unishard.config import Config
from unishard.distributed.dtypes import DTYPES, name_of
from unishard.engine.model.facts import ModelFacts
from unishard.engine.results import Placement
from unishard.errors import EngineMismatchError

__all__ = ["verify"]


def verify(
    placement: Placement, facts: ModelFacts, cfg: Config, device: torch.device, *, engine: str, units: Sequence[str], group_size: int
) -> None:
    """Compare what runs with what was asked. Collective.

    Args:
        placement: What the engine says it holds.
        facts: The model before sharding.
        cfg: What was asked.
        device: Where this rank computes.
        engine: Class that must run the model.
        units: Names of the modules that must be gathered on their own.
        group_size: Ranks that share one copy.

    Raises:
        EngineMismatchError: On every rank, listing every difference.
    """
    world, strategy = dist.get_world_size(), cfg.sharding.within_group
    slack = 0 if strategy == "no_shard" else facts.indivisible
    most, everything = -(-facts.trainable // group_size) + slack, facts.trainable * world // group_size
    everywhere = torch.tensor(placement.master_numel, dtype=torch.int64, device=device)
    dist.all_reduce(everywhere)
    found: list[tuple[str, Any, Any]] = []
    if placement.engine != engine:
        found.append(("engine", engine, placement.engine))
    # ZeRO-1 and ZeRO-2 keep whole parameters on each rank, so an engine need not have units there.
    if set(placement.units) != set(units) and (strategy == "full_shard" or placement.units):
        found.append(("sharded units", ", ".join(units) or "none", ", ".join(placement.units) or "none"))
    masters = {name_of(DTYPES[cfg.precision.master])} if facts.trainable else set()
    if placement.master_dtypes != masters:
        wanted, got = (", ".join(sorted(formats)) or "none" for formats in (masters, placement.master_dtypes))
        found.append(("format of the master weights", wanted, got))
    if placement.master_numel > most:
        found.append(("master weights on this rank", f"at most {most:,} elements", f"{placement.master_numel:,}"))
    if int(everywhere) < everything:
        found.append(("master weights on all ranks", f"at least {everything:,} elements", f"{int(everywhere):,}"))
    # Frozen parameters keep their format on every engine: a base in bf16 has no fp32 copy. What is not trained is in the compute format.
    whole = 4 * facts.trainable + facts.frozen_bytes if facts.trainable else DTYPES[cfg.precision.compute].itemsize * facts.elements
    largest = -(-whole // group_size) + 4 * slack if strategy == "full_shard" else whole
    if placement.param_bytes > largest:
        found.append(("parameters on this rank", f"at most {largest:,} bytes", f"{placement.param_bytes:,}"))
    everyones: list[Any] = [None] * world
    dist.all_gather_object(everyones, [f"{what}: asked for {asked}, got {got}" for what, asked, got in found])
    where: dict[str, list[str]] = {}
    for rank, lines in enumerate(everyones):
        for line in lines:
            where.setdefault(line, []).append(str(rank))
    if where:
        raise EngineMismatchError(
            f"backend {cfg.backend!r} does not run what was asked; please report this bug:\n"
            + "\n".join(f"{line} (rank {', '.join(ranks[:8])})" for line, ranks in where.items())
        )
