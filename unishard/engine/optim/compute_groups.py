"""Parameter groups of one compute dtype each: DeepSpeed's optimizers flatten a group into one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from unishard.contract.kit.kept_fp32 import is_kept
from unishard.distributed.nested_optimizers import holds_copies, optimizers_in
from unishard.errors import ConfigError, Problem


def separate(optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:
    """Move parameters that stay in fp32 (`precision.keep_fp32`) into groups of their own, with the same options, behind
    the others.

    The same for every engine, so that optimizers and checkpoints have the same groups. Changes nothing if nothing is
    kept.

    Args:
        optimizer: Has not stepped yet.
        scheduler: One that the caller has built on the optimizer, with a rate for each of its groups.

    Raises:
        ConfigError: Groups would be moved, and there is such a scheduler, or the optimizer holds others or copies.
    """
    others: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        places = [at for at, parameter in enumerate(group["params"]) if is_kept(parameter)]
        if 0 < len(places) < len(group["params"]):
            _require_free_order(optimizer, scheduler)
            kept.append(_only(group, places))
            group.update(_only(group, [at for at in range(len(group["params"])) if at not in places]))
            others.append(group)
        else:
            (kept if places else others).append(group)
    if [*map(id, others + kept)] != [*map(id, optimizer.param_groups)]:
        _require_free_order(optimizer, scheduler)
        optimizer.param_groups[:] = others + kept


def _only(group: dict[str, Any], places: list[int]) -> dict[str, Any]:
    lists = [key for key in ("params", "param_names") if key in group]
    return {**group, **{key: [group[key][at] for at in places] for key in lists}}


def _require_free_order(optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:
    """Check that nothing else goes by the groups of an optimizer."""
    if scheduler is not None:
        what = (
            f"{type(scheduler).__name__} has a rate for each group of the optimizer, and precision.keep_fp32 makes "
            "other groups; pass a function that builds it, such as lambda optimizer: StepLR(optimizer, 30)"
        )
        raise ConfigError([Problem("scheduler", what)])
    shapes = {parameter.shape for group in optimizer.param_groups for parameter in group["params"]}
    if len(optimizers_in(optimizer)) > 1 or holds_copies(optimizer, shapes):
        what = (
            f"{type(optimizer).__name__} holds other optimizers or copies of weights by its groups, which "
            "precision.keep_fp32 would change; give the parameters that it keeps groups of their own, behind the others"
        )
        raise ConfigError([Problem("optimizer", what)])
