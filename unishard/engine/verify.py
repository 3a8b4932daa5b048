"""After prepare: what runs is what was asked, read off the engine's live tensors, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unishard.backend import Placement
from unishard.config import Config
from unishard.errors import EngineMismatchError, ModelError

__all__ = ["ModelFacts", "description_of", "facts_of", "verify"]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model is before it is sharded."""

    elements: int
    """Elements of its parameters, each counted once."""
    trainable: int
    """Those of them that are trained."""
    indivisible: int
    """Elements that a fair division between ranks may leave on one of them: whole rows and padding, or a whole parameter."""


def description_of(model: Any) -> dict[str, str]:
    """What must be the same on every rank: the class, and shape, dtype and frozenness of each parameter and buffer. Raises nothing."""
    described = {"class of the model": type(model).__name__}
    if isinstance(model, nn.Module):
        for name, parameter in model.named_parameters():
            described[name] = f"{tuple(parameter.shape)} {parameter.dtype}{'' if parameter.requires_grad else ' frozen'}"
        for name, buffer in model.named_buffers():
            described[name] = f"{tuple(buffer.shape)} {buffer.dtype}"
    return described


def facts_of(model: nn.Module) -> ModelFacts:
    """Read the facts of a model that is not sharded yet.

    Raises:
        ModelError: It has no parameters, none that is trainable, or trainable ones that are not fp32.
    """
    parameters = list(model.parameters())
    if not parameters:
        raise ModelError(f"{type(model).__name__} has no parameters; there is nothing to train")
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        raise ModelError(f"all {len(parameters)} parameters of {type(model).__name__} are frozen; set requires_grad on those to train")
    low = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.dtype != torch.float32]
    if low:
        raise ModelError(
            f"trainable parameters must be fp32, since they become the master weights, but {low[0]} and {len(low) - 1} others of "
            f"{type(model).__name__} are not; call model.float() and choose the format of computation with precision.compute"
        )
    # FSDP2 divides by rows of dim 0, ZeRO pads flat parts by a few elements, ZeroRedundancyOptimizer keeps parameters whole.
    rows = sum(max(64, parameter[0].numel() if parameter.dim() and len(parameter) else 1) for parameter in parameters)
    return ModelFacts(
        elements=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in trainable),
        indivisible=max(rows, *(parameter.numel() for parameter in trainable)),
    )


def verify(placement: Placement, facts: ModelFacts, cfg: Config, device: torch.device, *, engine: str, units: Sequence[str]) -> None:
    """Compare what runs with what was asked. Collective.

    Args:
        placement: What the engine says it holds.
        facts: The model before sharding.
        cfg: What was asked.
        device: Where this rank computes.
        engine: Class that must run the model.
        units: Names of the modules that must be gathered on their own.

    Raises:
        EngineMismatchError: On every rank, listing every difference.
    """
    world, strategy = dist.get_world_size(), cfg.sharding.strategy
    parts, slack = (1, 0) if strategy == "no_shard" else (world, facts.indivisible)
    most, everything = -(-facts.trainable // parts) + slack, facts.trainable * world // parts
    everywhere = torch.tensor(placement.master_numel, dtype=torch.int64, device=device)
    dist.all_reduce(everywhere)
    found: list[tuple[str, Any, Any]] = []
    if placement.engine != engine:
        found.append(("engine", engine, placement.engine))
    # ZeRO-1 and ZeRO-2 keep whole parameters on each rank, so an engine need not have units there.
    if set(placement.units) != set(units) and (strategy == "full_shard" or placement.units):
        found.append(("sharded units", ", ".join(units) or "none", ", ".join(placement.units) or "none"))
    if placement.master_dtypes != {"float32"}:
        found.append(("format of the master weights", "float32", ", ".join(sorted(placement.master_dtypes))))
    if placement.master_numel > most:
        found.append(("master weights on this rank", f"at most {most:,} elements", f"{placement.master_numel:,}"))
    if int(everywhere) < everything:
        found.append(("master weights on all ranks", f"at least {everything:,} elements", f"{int(everywhere):,}"))
    largest = 4 * (-(-facts.elements // parts) + slack)
    if strategy == "full_shard" and placement.param_bytes > largest:
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
