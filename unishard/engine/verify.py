"""Check after `prepare` that the engine matches the config, from its live tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from unishard.config import Config
from unishard.contract.results import Placement
from unishard.distributed.dtypes import DTYPES, name_of
from unishard.engine.model.facts import ModelFacts
from unishard.errors import EngineMismatchError

__all__ = ["verify"]


def verify(
    placement: Placement,
    facts: ModelFacts,
    cfg: Config,
    device: torch.device,
    *,
    engine: str,
    units: Sequence[str],
    group_size: int,
    kept: int = 0,
) -> None:
    """Compare the engine with the config. Collective.

    Args:
        placement: What the engine holds.
        facts: The model before sharding.
        cfg: The config.
        device: Where this rank computes.
        engine: Class that must run the model.
        units: Names of the modules that must be gathered together.
        group_size: Ranks that share one copy.
        kept: Elements of parameters that stay in fp32 in a 16-bit run.

    Raises:
        EngineMismatchError: On every rank, with every difference.
    """
    world, strategy = dist.get_world_size(), cfg.sharding.within_group
    slack = 0 if strategy == "no_shard" else facts.indivisible
    most, everything = -(-facts.trainable // group_size) + slack, facts.trainable * world // group_size
    everywhere = torch.tensor(placement.master_numel, dtype=torch.int64, device=device)
    dist.all_reduce(everywhere)
    found: list[tuple[str, Any, Any]] = []
    if placement.engine != engine:
        found.append(("engine", engine, placement.engine))
    # ZeRO-1 and ZeRO-2 keep full parameters on each rank, so an engine need not have units there.
    if set(placement.units) != set(units) and (strategy == "full_shard" or placement.units):
        found.append(("sharded units", ", ".join(units) or "none", ", ".join(placement.units) or "none"))
    masters = {name_of(DTYPES[cfg.precision.master])} if facts.trainable else set()
    if placement.master_dtypes != masters:
        wanted, got = (", ".join(sorted(dtypes)) or "none" for dtypes in (masters, placement.master_dtypes))
        found.append(("dtype of the master weights", wanted, got))
    if placement.master_numel > most:
        found.append(("master weights on this rank", f"at most {most:,} elements", f"{placement.master_numel:,}"))
    if int(everywhere) < everything:
        found.append(("master weights on all ranks", f"at least {everything:,} elements", f"{int(everywhere):,}"))
    # Frozen parameters keep their dtype on every engine, without an fp32 copy. For inference all are in the compute
    # dtype.
    full = (
        4 * facts.trainable + facts.frozen_bytes
        if facts.trainable
        else DTYPES[cfg.precision.compute].itemsize * facts.elements
    )
    full += (DTYPES["fp32"].itemsize - DTYPES["bf16"].itemsize) * kept
    largest = -(-full // group_size) + 4 * slack if strategy == "full_shard" else full
    if placement.param_bytes > largest:
        found.append(("parameters on this rank", f"at most {largest:,} bytes", f"{placement.param_bytes:,}"))
    differences: list[Any] = [None] * world
    dist.all_gather_object(differences, [f"{what}: expected {expected}, got {got}" for what, expected, got in found])
    where: dict[str, list[str]] = {}
    for rank, lines in enumerate(differences):
        for line in lines:
            where.setdefault(line, []).append(str(rank))
    if where:
        raise EngineMismatchError(
            f"the engine of backend {cfg.backend!r} does not match the config; please report this bug:\n"
            + "\n".join(f"{line} (rank {', '.join(ranks[:8])})" for line, ranks in where.items())
        )
