"""Rows of the table that unishard's loop and the torch optimizer honour, around DeepSpeed."""

from __future__ import annotations

from unishard.mapping.rules import Fit, Rule, loop

__all__ = ["LOOP"]

_TORCH_OPTIMIZER = "unishard builds the optimizer and passes it in; ZeRO hands it flat fp32 partitions, the same maths element by element"


def _optimizer_field() -> Rule:
    return Rule(Fit.EXACT, "client optimizer", _TORCH_OPTIMIZER)


def _groups_field() -> Rule:
    return Rule(Fit.EXACT, "groups of the client optimizer", "ZeRO flattens each group on its own, so that no partition mixes two")


LOOP: dict[str, Rule] = {
    "optimizer.name": _optimizer_field(),
    "optimizer.lr": _optimizer_field(),
    "optimizer.betas": _optimizer_field(),
    "optimizer.eps": _optimizer_field(),
    "optimizer.amsgrad": _optimizer_field(),
    "optimizer.momentum": _optimizer_field(),
    "optimizer.nesterov": _optimizer_field(),
    "optimizer.weight_decay": _optimizer_field(),
    "optimizer.no_decay": _groups_field(),
    "optimizer.groups": _groups_field(),
    "scheduler.name": loop("writes the learning rate of each update into the optimizer's groups"),
    "scheduler.warmup_steps": loop("moves once for each real update"),
    "scheduler.warmup_type": loop("part of the same formula"),
    "scheduler.warmup_start_ratio": loop("part of the same formula"),
    "scheduler.delay_steps": loop("counts updates"),
    "scheduler.total_steps": loop("moves once for each real update"),
    "scheduler.min_lr_ratio": loop("part of the same formula"),
}
