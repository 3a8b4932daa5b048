"""Fields that decide nothing under a config, because something else is off.

The sections refuse most of them if a file sets them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from unishard.config import Config
from unishard.config.logging import USERS


class _Case(NamedTuple):
    fields: tuple[str, ...]
    holds: Callable[[Config], bool]
    why: str


def _optimizer_without(*names: str) -> Callable[[Config], bool]:
    return lambda cfg: cfg.optimizer.name not in names


def _no_offload(cfg: Config) -> bool:
    return (cfg.offload.params, cfg.offload.optimizer) == ("none", "none")


def _not_to(users: tuple[str, ...]) -> Callable[[Config], bool]:
    return lambda cfg: not {*users} & {*cfg.logging.to}


_SCALE = ("precision.loss_scale", "precision.initial_loss_scale", "precision.loss_scale_growth_interval")
_CASES = (
    _Case(("sharding.group_size",), lambda cfg: not cfg.sharding.hybrid, "the strategy has no groups"),
    _Case(
        ("sharding.units", "sharding.min_unit_params"),
        lambda cfg: cfg.sharding.strategy == "no_shard",
        "nothing is gathered",
    ),
    _Case(
        ("sharding.reshard_after_forward",),
        lambda cfg: cfg.sharding.within_group != "full_shard",
        "parameters are not sharded",
    ),
    _Case(_SCALE, lambda cfg: cfg.precision.compute != "fp16", "only fp16 has a loss scale"),
    _Case(_SCALE[1:], lambda cfg: cfg.precision.loss_scale != "dynamic", "the loss scale is constant"),
    _Case(
        ("precision.cast_inputs", "precision.keep_fp32"),
        lambda cfg: cfg.precision.compute == "fp32",
        "everything is in fp32",
    ),
    _Case(("offload.pin_memory",), _no_offload, "nothing is offloaded"),
    _Case(
        ("offload.nvme_path",),
        lambda cfg: "nvme" not in (cfg.offload.params, cfg.offload.optimizer),
        "nothing is offloaded to nvme",
    ),
    _Case(("optimizer.betas",), _optimizer_without("adamw", "adam", "lion"), "the optimizer has none"),
    _Case(("optimizer.eps",), _optimizer_without("adamw", "adam", "adagrad"), "the optimizer has none"),
    _Case(("optimizer.amsgrad",), _optimizer_without("adamw", "adam"), "the optimizer has none"),
    _Case(("optimizer.momentum", "optimizer.nesterov"), _optimizer_without("sgd"), "only sgd has it"),
    _Case(("optimizer.no_decay",), lambda cfg: not cfg.optimizer.weight_decay, "there is no weight decay"),
    _Case(
        ("scheduler.total_steps", "scheduler.min_lr_ratio"),
        lambda cfg: not cfg.scheduler.ends,
        "the schedule has no end",
    ),
    _Case(
        ("scheduler.warmup_type", "scheduler.warmup_start_ratio"),
        lambda cfg: not cfg.scheduler.warmup_steps,
        "there is no warm-up",
    ),
    _Case(
        ("scheduler.delay_steps",),
        lambda cfg: cfg.scheduler.name == "constant" and not cfg.scheduler.warmup_steps,
        "the rate is constant",
    ),
    _Case(
        ("communication.prefetch_bucket_size",),
        lambda cfg: cfg.sharding.within_group != "full_shard",
        "nothing is prefetched",
    ),
    _Case(("communication.desync_timeout",), lambda cfg: not cfg.communication.desync_check, "desync_check is off"),
    _Case(("compile.backend",), lambda cfg: cfg.compile.mode == "none", "nothing is compiled"),
    _Case(
        ("checkpoint.on_existing", "checkpoint.every_steps", "checkpoint.every_minutes", "checkpoint.on_signal"),
        lambda cfg: cfg.checkpoint.dir is None,
        "there is no checkpoint.dir",
    ),
    _Case(tuple(f"logging.{field}" for field in USERS), lambda cfg: not cfg.logging.to, "nothing is logged"),
    *(
        _Case((f"logging.{field}",), _not_to(users), f"only {' and '.join(users)} read it")
        for field, users in USERS.items()
    ),
    _Case(
        ("profile.dir", "profile.ranks", "profile.memory", "profile.shapes"),
        lambda cfg: not cfg.profile.steps,
        "no step is profiled",
    ),
    _Case(("checkpoint.keep_every",), lambda cfg: cfg.checkpoint.keep_last is None, "nothing is deleted"),
)


def unused(cfg: Config) -> dict[str, str]:
    """Why each field that decides nothing under this config does not, by its path."""
    return {path: case.why for case in reversed(_CASES) if case.holds(cfg) for path in case.fields}
