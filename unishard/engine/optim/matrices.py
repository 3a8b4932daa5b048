"""Optimizers that need whole matrices: build Muon from the config or from torch's, and say how the model is sharded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from unishard import config
from unishard.contract.adapter import Updates
from unishard.contract.plan import RunPlan
from unishard.distributed.layout import Layout
from unishard.distributed.shard_optimizer import ShardOptimizer
from unishard.distributed.shards import Shard
from unishard.engine.optim.empty_groups import let_copy_step
from unishard.engine.optim.stepped_by_name import stepped_by_name
from unishard.engine.optim.trial import ask, is_known
from unishard.errors import ConfigError, Problem
from unishard.matrices.matrix_optimizer import MatrixOptimizer
from unishard.matrices.muon import Muon
from unishard.matrices.owners import owned
from unishard.matrices.whole_tensors import Make, WholeLayout, WholeTensors

_logger = logging.getLogger("unishard")
_SHOWN = 6


def muon_of(cfg: config.Optimizer, groups: list[dict[str, Any]]) -> Muon:
    """Build Muon over groups, of which some are matrices."""
    for group in groups:
        if not group["matrices"]:
            group |= {"betas": cfg.betas, "eps": cfg.eps}
    return Muon(
        groups,
        lr=cfg.lr,
        weight_decay=cfg.weight_decay,
        momentum=cfg.momentum,
        nesterov=cfg.nesterov,
        ns_steps=cfg.ns_steps,
        adjust_lr_fn=cfg.adjust_lr,
        ns_dtype=cfg.ns_dtype,
    )


def on_shards(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer; in place of torch's Muon one with the same groups and options that steps shards.

    Its group dicts stay the same, so a scheduler on the optimizer still writes the live learning rates.

    Args:
        optimizer: Has not stepped yet.
    """
    if type(optimizer) is not torch.optim.Muon:
        return optimizer
    own: Muon = object.__new__(Muon)
    for group in optimizer.param_groups:
        group["matrices"] = True
    own.__setstate__({**vars(optimizer), "_options": dict(optimizer.defaults), "_sharing": None, "owned": {}})
    vars(own).pop("step", None)  # a scheduler has set a `step` that is bound to `optimizer`
    let_copy_step()
    return own


def on_owners(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], parameters: Sequence[Tensor], again: Make | None
) -> torch.optim.Optimizer:
    """The optimizer if its update is element-wise; else one with the same groups that lets it step whole tensors.

    Args:
        optimizer: Has not stepped yet.
        names: Names of its parameters, by `id`, in the model's order.
        parameters: These.
        again: Makes the same optimizer on other tensors, if it can be made again.
    """
    if isinstance(optimizer, ShardOptimizer) or is_known(optimizer):
        return optimizer
    needs = ask(optimizer, parameters, again)
    if needs.element_wise:
        return optimizer
    let_copy_step()
    return WholeTensors.of(optimizer, names, again, needs)


def share_matrices(updates: Updates, names: Sequence[Sequence[str]], layout: Mapping[str, Layout]) -> None:
    """Let an optimizer that needs whole matrices know how they are sharded; does nothing for others.

    Args:
        updates: Of the sharded model.
        names: Of the parameters in each group of the optimizer.
        layout: Which elements of each the ranks hold.
    """
    optimizer = updates.torch_optimizer
    if not isinstance(optimizer, MatrixOptimizer):
        return
    model, named = updates.model, dict(updates.model.module.named_parameters())
    groups = list(zip(names, optimizer.param_groups, strict=True))
    with torch.no_grad():
        sections: list[dict[str, Shard]] = [
            {name: model.master_shard(named[name]) for name in members} if group["matrices"] else {}
            for members, group in groups
        ]
    optimizer.share(owned(sections, layout), stepped_by_name(updates), model.device)
    if dist.get_rank() == 0:
        matrices = [name for section in sections for name in section]
        others = [name for members, group in groups if not group["matrices"] for name in members]
        _logger.info(
            "%s updates %d matrices (%s), AdamW %d other parameters (%s)",
            type(optimizer).__name__,
            len(matrices),
            _few(matrices),
            len(others),
            _few(others) or "none",
        )


def share_whole_tensors(updates: Updates, plan: RunPlan, layout: Mapping[str, Layout]) -> None:
    """Let an optimizer that steps whole tensors know how they are sharded; does nothing for others. Collective.

    Raises:
        ConfigError: It needs all tensors together, and they are on several ranks; or it cannot be sharded or saved.
    """
    optimizer = updates.torch_optimizer
    if not isinstance(optimizer, WholeTensors) or plan.optimizer is None:
        return
    kind = type(optimizer).__name__
    model, named = updates.model, dict(updates.model.module.named_parameters())
    groups = plan.optimizer.groups

    def sections() -> list[dict[str, Shard]]:
        return [{name: model.master_shard(named[name]) for name in names} for names in groups]

    with torch.no_grad():
        tensors = owned(sections(), layout, cost=prod)
    shared = any(each.group is not None for members in tensors for each in members)
    unsaved = plan.checkpoint.dir is not None and optimizer.needs.unsaved
    if shared and not optimizer.needs.by_tensor:
        _refuse(
            f"{kind} updates a tensor by what it finds in others, such as the norm of all gradients in step(), and "
            "with sharding no rank has all; write sharding: no_shard, or training.gradient_clipping in place of a "
            "norm in step()"
        )
    if unsaved:
        _refuse(f"the state of {kind} cannot be saved, and checkpoint.dir is set: {unsaved}")
    optimizer.share(
        WholeLayout(
            layout={id(group): members for group, members in zip(optimizer.param_groups, tensors, strict=True)},
            stepped=stepped_by_name(updates),
            shards=lambda: {name: shard for section in sections() for name, shard in section.items()},
            written=model.weights_written,
            device=model.device,
            steps_on=model.device if plan.model.offload.optimizer == "none" else torch.device("cpu"),
            calls=updates.calls_in_update,
        ),
        {name: named[name] for names in groups for name in names} if plan.guard.full_weights else None,
    )
    if shared and not dist.get_rank():
        if optimizer.needs.unknown:
            _logger.warning(
                "what %s looks at in an update is not known, since its steps on small tensors fail (%s); each tensor "
                "is sent whole to one rank, which is right unless an update looks at several",
                kind,
                optimizer.needs.unknown,
            )
        else:
            _logger.info("%s is not element-wise: each tensor is sent whole to one rank, which updates it", kind)


def _refuse(what: str) -> NoReturn:
    raise ConfigError([Problem("optimizer", what)])


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
