"""Check after `prepare` that the engine matches the config, from its live tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from unishard.config import Precision
from unishard.contract.plan import ExpectedPlacement
from unishard.contract.results import Placement
from unishard.distributed.dtypes import DTYPES, name_of
from unishard.engine.model.facts import ModelFacts
from unishard.errors import EngineMismatchError


def expected_placement(
    facts: ModelFacts,
    precision: Precision,
    *,
    engine: str,
    units: Sequence[str],
    strategy: str,
    ranks: int,
    group_size: int,
    kept: int,
    replicated: int,
) -> ExpectedPlacement:
    """What an engine must hold.

    Args:
        facts: The model before sharding.
        precision: The section.
        engine: Class that must run the model.
        units: Names of the modules that must be gathered together.
        strategy: The strategy within a group.
        ranks: All of them.
        group_size: Ranks that share one copy.
        kept: Elements of parameters that stay in fp32 in a 16-bit run.
        replicated: Elements of parameters that every rank holds whole, beside a shard in some engines.
    """
    slack = 0 if strategy == "no_shard" else facts.indivisible
    # Frozen parameters keep their dtype on every engine, without an fp32 copy. For inference all are in the compute
    # dtype.
    full = (
        4 * facts.trainable + facts.frozen_bytes
        if facts.trainable
        else DTYPES[precision.compute].itemsize * facts.elements
    )
    full += (DTYPES["fp32"].itemsize - DTYPES["bf16"].itemsize) * kept
    return ExpectedPlacement(
        engine=engine,
        units=units,
        # ZeRO-1 and ZeRO-2 keep full parameters on each rank, so an engine need not have units there.
        has_units=strategy == "full_shard",
        master_dtypes=frozenset({name_of(DTYPES[precision.master])} if facts.trainable else ()),
        master_numel=-(-facts.trainable // group_size) + slack + replicated,
        all_masters=facts.trainable * ranks // group_size,
        param_bytes=-(-full // group_size) + 4 * (slack + replicated) if strategy == "full_shard" else full,
    )


def verify(placement: Placement, expected: ExpectedPlacement, device: torch.device, *, backend: str) -> None:
    """Compare the engine with what was planned. Collective.

    Args:
        placement: What the engine holds.
        expected: What it must hold.
        device: Where this rank computes.
        backend: Its name.

    Raises:
        EngineMismatchError: On every rank, with every difference.
    """
    everywhere = torch.tensor(placement.master_numel, dtype=torch.int64, device=device)
    dist.all_reduce(everywhere)
    rows: list[tuple[str, Any, Any]] = []
    if placement.engine != expected.engine:
        rows.append(("engine", expected.engine, placement.engine))
    if set(placement.units) != set(expected.units) and (expected.has_units or placement.units):
        rows.append(("sharded units", _listed(expected.units), _listed(placement.units)))
    if placement.master_dtypes != expected.master_dtypes:
        wanted, got = _listed(sorted(expected.master_dtypes)), _listed(sorted(placement.master_dtypes))
        rows.append(("dtype of the master weights", wanted, got))
    if placement.master_numel > expected.master_numel:
        most = f"at most {expected.master_numel:,} elements"
        rows.append(("master weights on this rank", most, f"{placement.master_numel:,}"))
    if int(everywhere) < expected.all_masters:
        least = f"at least {expected.all_masters:,} elements"
        rows.append(("master weights on all ranks", least, f"{int(everywhere):,}"))
    if placement.param_bytes > expected.param_bytes:
        most = f"at most {expected.param_bytes:,} bytes"
        rows.append(("parameters on this rank", most, f"{placement.param_bytes:,}"))
    differences: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(differences, [f"{what}: expected {expected}, got {got}" for what, expected, got in rows])
    where: dict[str, list[str]] = {}
    for rank, lines in enumerate(differences):
        for line in lines:
            where.setdefault(line, []).append(str(rank))
    if where:
        raise EngineMismatchError(
            f"the engine of backend {backend!r} does not match the config; please report this bug:\n"
            + "\n".join(f"{line} (rank {', '.join(ranks[:8])})" for line, ranks in where.items())
        )


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words) or "none"
