"""Rows of the table that unishard's loop and the torch optimizer honour, around DeepSpeed."""

from __future__ import annotations

from unishard.rules import Fit, Rule, When, idle, loop

__all__ = ["COMPILE", "LOOP", "RECOMPUTATION", "WHOLE_UNITS"]

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
    "scheduler.total_steps": loop("moves once for each real update"),
    "scheduler.min_lr_ratio": loop("part of the same formula"),
}

RECOMPUTATION: dict[str, Rule] = {
    "activation_checkpointing": Rule(
        Fit.EXACT,
        "torch.utils.checkpoint.checkpoint",
        "around `forward`, inside the engine's hooks; without reentrance, and random numbers are drawn again alike",
    ),
}

COMPILE: dict[str, Rule] = {
    "compile.mode": Rule(
        Fit.EQUIVALENT,
        "torch.compile",
        "of each block's `forward`; DeepSpeed's hooks are not compiled, and DeepCompile is not used",
        when=(
            idle("none", lambda cfg: cfg.compile.mode == "none", ""),
            When(
                "full with full_shard",
                lambda cfg: cfg.compile.mode == "full" and cfg.sharding.within_group == "full_shard",
                Fit.EQUIVALENT,
                "of the root's `forward`, with a graph break at each module that gathers; choose per_block for larger graphs",
            ),
            When("full", lambda cfg: cfg.compile.mode == "full", Fit.EQUIVALENT, "of the root's `forward`"),
        ),
    ),
    "compile.backend": Rule(Fit.EXACT, "torch.compile(backend=...)"),
}

WHOLE_UNITS: dict[str, Rule] = {
    "sharding.whole_units": Rule(
        Fit.EXACT,
        "none: unishard's own",
        "where a rank did not use a parameter, it adds zeros to the average",
        when=(
            idle("empty", lambda cfg: not cfg.sharding.whole_units, ""),
            When(
                "full_shard",
                lambda cfg: cfg.sharding.within_group == "full_shard",
                Fit.EQUIVALENT,
                "gathered with the leaf module around them; those in none are gathered before each forward and dropped after each "
                "backward, without DeepSpeed's hooks; their gradients stay whole until backward ends",
            ),
            When(
                "shard_grad_op",
                lambda cfg: cfg.sharding.within_group == "shard_grad_op",
                Fit.EQUIVALENT,
                "their gradients stay whole until backward ends, and are then reduced in one order on every rank",
            ),
        ),
    ),
}
