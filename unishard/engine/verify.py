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

    trainable: int
    """Elements of its trainable parameters, each counted once."""
    tensors: int
    """Number of its trainable parameters."""
    largest_row: int
    """Most elements that one index of the first dim of a trainable parameter holds: what sharding by dim 0 cannot divide."""


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
    return ModelFacts(
        trainable=sum(parameter.numel() for parameter in trainable),
        tensors=len(trainable),
        largest_row=max(parameter.numel() // max(1, parameter.shape[0]) if parameter.dim() else 1 for parameter in trainable),
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
    parts = 1 if strategy == "no_shard" else world
    # Sharding by dim 0 keeps whole rows together, and flat partitions are padded by a few elements for each parameter.
    most = facts.trainable if strategy == "no_shard" else -(-facts.trainable // parts) + facts.tensors * max(facts.largest_row, 64)
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
    if int(everywhere) < facts.trainable * world // parts:
        found.append(("master weights on all ranks", f"at least {facts.trainable * world // parts:,} elements", f"{int(everywhere):,}"))
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
