"""How TrainingArguments say the optimizer and the schedule (transformers 5.23)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.field_rows import copied, exact, left_to_script, row
from unishard.contract.rules import SCRIPT, Fit, Rule, When, unless
from unishard.formats.hf.optimizing import ADAM, NO_DECAY

__all__ = ["OPTIMIZING"]

_NAMES = {"adamw": "adamw_torch", "sgd": "sgd", "adagrad": "adagrad", "lion": "lion_32bit"}


def _named(*names: str) -> Callable[[Config], bool]:
    return lambda cfg: cfg.optimizer.name in names


def _arguments(cfg: Config, topology: Topology) -> Native:
    """`optim_args`, which is one text."""
    chosen = cfg.optimizer
    pairs: dict[str, Any] = {}
    if chosen.name == "sgd" and chosen.momentum:
        pairs = {"momentum": chosen.momentum, **({"nesterov": "true"} if chosen.nesterov else {})}
    if chosen.name == "adagrad":
        pairs = {"eps": chosen.eps}
    return {"optim_args": ",".join(f"{key}={value}" for key, value in pairs.items())} if pairs else {}


def _betas(cfg: Config, topology: Topology) -> Native:
    one, two = cfg.optimizer.betas
    return {"adam_beta1": one, "adam_beta2": two} if cfg.optimizer.name in (*ADAM, "lion") else {}


def _eps(cfg: Config, topology: Topology) -> Native:
    return {"adam_epsilon": cfg.optimizer.eps} if cfg.optimizer.name in ADAM else {}


def _schedule(cfg: Config, topology: Topology) -> Native:
    scheduler, end = cfg.scheduler, cfg.scheduler.min_lr_ratio
    if scheduler.name == "constant" or end == 1:
        return {"lr_scheduler_type": "constant_with_warmup" if scheduler.warmup_steps else "constant"}
    if not end:
        return {"lr_scheduler_type": scheduler.name}
    if scheduler.name == "cosine":
        return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": end}}
    return {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 1.0, "lr_end": cfg.optimizer.lr * end}}


def _steps(cfg: Config, topology: Topology) -> Native:
    return {"max_steps": cfg.scheduler.total_steps} if cfg.scheduler.total_steps else {}


_PASS = "pass Trainer(..., optimizers=(optimizer, None)) with"
_GROUPS = "override Trainer.get_decay_parameter_names, or Trainer(..., optimizers=(optimizer, None))"

_CLIMB = "transformers warms up linearly from 0; Trainer(..., optimizers=(optimizer, scheduler))"

OPTIMIZING: Mapping[str, Rule] = {
    "optimizer.name": exact(
        "optim",
        When("adam", _named("adam"), Fit.NEEDS_INPUT, f"transformers has only AdamW; {_PASS} torch.optim.Adam"),
        When("lion", _named("lion"), Fit.EQUIVALENT, "bitsandbytes' Lion: the same algorithm"),
        to=lambda cfg, topology: {"optim": _NAMES[cfg.optimizer.name]} if cfg.optimizer.name in _NAMES else {},
    ),
    "optimizer.lr": copied("optimizer.lr", "learning_rate"),
    "optimizer.betas": exact("adam_beta1, adam_beta2", to=_betas),
    "optimizer.eps": exact("adam_epsilon, optim_args", to=_eps),
    "optimizer.amsgrad": left_to_script(
        f"{_PASS} torch.optim.AdamW(..., amsgrad=True)", lambda cfg: not cfg.optimizer.amsgrad, "false"
    ),
    "optimizer.momentum": exact("optim_args", to=_arguments),
    "optimizer.nesterov": exact("optim_args"),
    "optimizer.weight_decay": copied("optimizer.weight_decay", "weight_decay"),
    "optimizer.no_decay": row(
        Fit.NEEDS_INPUT,
        SCRIPT,
        f"Trainer exempts biases and norms, other names than these; {_GROUPS}",
        unless("no weight decay", lambda cfg: not cfg.optimizer.weight_decay),
        unless("what Trainer exempts", lambda cfg: cfg.optimizer.no_decay == [NO_DECAY]),
        When(
            "empty",
            lambda cfg: not cfg.optimizer.no_decay,
            Fit.APPROXIMATE,
            f"Trainer exempts biases and norms from weight decay; to decay them, {_GROUPS}",
        ),
    ),
    "optimizer.groups": left_to_script(_GROUPS, lambda cfg: not cfg.optimizer.groups, "empty"),
    "scheduler.name": exact("lr_scheduler_type", to=_schedule),
    "scheduler.warmup_steps": copied("scheduler.warmup_steps", "warmup_steps"),
    "scheduler.warmup_type": left_to_script(_CLIMB, lambda cfg: cfg.scheduler.warmup_type == "linear", "linear"),
    "scheduler.warmup_start_ratio": left_to_script(_CLIMB, lambda cfg: not cfg.scheduler.warmup_start_ratio, "0"),
    "scheduler.delay_steps": left_to_script(_CLIMB, lambda cfg: not cfg.scheduler.delay_steps, "0"),
    "scheduler.total_steps": exact("max_steps", to=_steps),
    "scheduler.min_lr_ratio": exact("lr_scheduler_kwargs"),
}
"""Rows of the optimizer and the schedule, which stand in TrainingArguments whatever the engine."""
