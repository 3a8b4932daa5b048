"""Check after `prepare` that the engine holds what was planned, by its live tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from unishard.contract.adapter import ShardedModel
from unishard.contract.model_shape import ITEMSIZE, ParameterShape, itemsize
from unishard.contract.plan import RunPlan
from unishard.contract.results import Placement
from unishard.distributed.dtypes import DTYPES, name_of
from unishard.distributed.layout import Layout
from unishard.distributed.shard_optimizer import ShardOptimizer
from unishard.errors import BackendError, EngineMismatchError

_MORE = 64
"""Elements by which memory for a shard may differ from the planned ones: an engine may pad otherwise."""


def verify(adapter: ShardedModel, placement: Placement, plan: RunPlan, layout: Mapping[str, Layout]) -> None:
    """Compare the engine with what was planned. Collective.

    Args:
        adapter: The engine.
        placement: What it holds.
        plan: What it was built from.
        layout: Which elements of each parameter each rank must hold.

    Raises:
        EngineMismatchError: On every rank, with every difference.
    """
    rows = [*_placed(placement, plan, layout), *_cut(adapter, plan, layout)]
    differences: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(differences, [f"{what}: expected {expected}, got {got}" for what, expected, got in rows])
    where: dict[str, list[str]] = {}
    for rank, lines in enumerate(differences):
        for line in lines:
            where.setdefault(line, []).append(str(rank))
    if where:
        raise EngineMismatchError(
            f"the engine of backend {plan.backend.name!r} does not match the config; please report this bug:\n"
            + "\n".join(f"{line} (rank {', '.join(ranks[:8])})" for line, ranks in where.items())
        )


def _placed(placement: Placement, plan: RunPlan, layout: Mapping[str, Layout]) -> Iterator[tuple[str, str, str]]:
    """Differences in what an engine reports: what, what was planned, and what it is."""
    engine = plan.model.name if plan.engine is None else plan.engine.engine
    units = [] if plan.engine is None else [unit.name for unit in plan.model.units.gathered]
    trained, rank = _trained(plan), plan.topology.rank
    dtypes = frozenset({name_of(DTYPES[plan.model.precision.master])} if trained else ())
    if placement.engine != engine:
        yield "engine", engine, placement.engine
    # ZeRO-1 and ZeRO-2 keep full parameters on each rank, so an engine need not have units there.
    if set(placement.units) != set(units) and (plan.guard.gathers or placement.units):
        yield "sharded units", _listed(units), _listed(placement.units)
    if placement.master_dtypes != dtypes:
        yield "dtype of the master weights", _listed(sorted(dtypes)), _listed(sorted(placement.master_dtypes))
    held, spare = f"{placement.master_numel:,}", _MORE * len(trained)
    most = sum(layout[each.name].padded(rank) for each in trained) + spare
    least = sum(len(layout[each.name].of(rank)) for each in trained) - spare
    if placement.master_numel > most:
        yield "master weights on this rank", f"at most {most:,} elements", held
    if placement.master_numel < least:
        yield "master weights on this rank", f"at least {least:,} elements", held
    nbytes = sum(_bytes_of(each, plan, layout[each.name]) for each in plan.model.shape.parameters)
    if placement.param_bytes > nbytes:
        yield "parameters on this rank", f"at most {nbytes:,} bytes", f"{placement.param_bytes:,}"


def _bytes_of(parameter: ParameterShape, plan: RunPlan, layout: Layout) -> int:
    """The most bytes that a rank may hold of a parameter between steps."""
    precision, kept = plan.model.precision, parameter.name in plan.model.kept
    if plan.optimizer is None:
        size = ITEMSIZE["fp32" if kept else precision.compute]
    else:  # frozen parameters keep their dtype on every engine, without an fp32 copy
        size = ITEMSIZE["fp32"] if kept or parameter.trainable else itemsize(parameter.dtype)
    if not plan.guard.gathers:
        return size * parameter.numel
    # Beside a shard in some engines.
    whole = parameter.numel if parameter.replicated else 0
    return size * (layout.padded(plan.topology.rank) + _MORE + whole)


def _cut(adapter: ShardedModel, plan: RunPlan, layout: Mapping[str, Layout]) -> Iterator[tuple[str, str, str]]:
    """The first master weight of which this rank holds other elements than planned.

    That an untested version may do, but where an optimizer is told which elements each rank has.
    """
    optimizer = None if adapter.updates is None else adapter.updates.torch_optimizer
    if not plan.guard.tested and not isinstance(optimizer, ShardOptimizer):
        return
    named = dict(adapter.module.named_parameters())
    try:
        with torch.no_grad():
            held = {each.name: adapter.master_shard(named[each.name]).interval for each in _trained(plan)}
    except BackendError:  # this engine's version does not say, and nothing else may need it
        return
    for name, elements in held.items():
        planned = layout[name].of(plan.topology.rank)
        if elements != planned:
            yield f"elements of {name} on this rank", _interval(planned), _interval(elements)
            return


def _trained(plan: RunPlan) -> tuple[ParameterShape, ...]:
    return () if plan.optimizer is None else plan.model.shape.trainable


def _interval(elements: range) -> str:
    return f"{elements.start:,} to {elements.stop:,}" if elements else "none"


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words) or "none"
