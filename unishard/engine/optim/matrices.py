"""Optimizers that need whole matrices: build Muon from the config or from torch's, and say how the model is sharded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from unishard import config
from unishard.contract.adapter import EngineAdapter
from unishard.distributed.shards import Shard
from unishard.engine.optim.empty_groups import let_copy_step
from unishard.engine.optim.stepped_by_name import stepped_by_name
from unishard.matrices.layout import layout_of
from unishard.matrices.matrix_optimizer import MatrixOptimizer
from unishard.matrices.muon import Muon

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


def steps_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer that needs whole matrices can step shards, or `on_shards` makes one of it that can."""
    return isinstance(optimizer, MatrixOptimizer) or type(optimizer) is torch.optim.Muon


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


def share_matrices(adapter: EngineAdapter, names: Sequence[Sequence[str]]) -> None:
    """Let an optimizer that needs whole matrices know how they are sharded; does nothing for others. Collective.

    Args:
        adapter: The sharded model and its optimizer.
        names: Of the parameters in each group of the optimizer.
    """
    optimizer = adapter.torch_optimizer
    if not isinstance(optimizer, MatrixOptimizer):
        return
    named = dict(adapter.module.named_parameters())
    groups = list(zip(names, optimizer.param_groups, strict=True))
    with torch.no_grad():
        sections: list[dict[str, Shard]] = [
            {name: adapter.master_shard(named[name]) for name in members} if group["matrices"] else {}
            for members, group in groups
        ]
        layout = layout_of(sections, adapter.device)
    optimizer.share(layout, stepped_by_name(adapter), adapter.device)
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


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
