"""Explain each value of a config: its origin, and its translation for each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from unishard.config import Config, leaves, value_at
from unishard.config.batch_sizes import check_batch
from unishard.config.describe import bare
from unishard.config.loading import Origins
from unishard.config.logging import USERS
from unishard.config.nested import flat
from unishard.config.topology import Topology
from unishard.contract import registry
from unishard.contract.report import translate
from unishard.contract.rules import Fit

# -- Fields that decide nothing under a config, because something else is off ----------------------
# The sections refuse most of them if a file sets them.


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


_NULL_IS_ON = frozenset({"sharding.group_size"})
"""Fields whose `null` stands for a value."""


@dataclass(frozen=True, slots=True)
class Image:
    """The translation of one field for one backend."""

    fit: Fit
    native: str
    """The settings written, such as `zero_optimization.stage = 3`; if there are none, what implements the field, or
    that it is off."""
    note: str
    off: bool = False
    """Whether the field is off, or decides nothing under this config."""

    @property
    def has_note(self) -> bool:
        """Whether the note says how a setting differs."""
        return self.fit is not Fit.EXACT and not self.off


@dataclass(frozen=True, slots=True)
class ExplainedField:
    """One field, or one computed value."""

    path: str
    value: Any
    origin: str
    """`file:line`, `override`, `given`, `default` or `computed`."""
    images: Mapping[str, Image]
    """By backend; empty for a computed value."""

    @property
    def is_set(self) -> bool:
        """Whether the file or an override sets the field."""
        return self.origin != "default" and not self.origin.startswith("computed ")


def explain(cfg: Config, origins: Origins, topology: Topology | None = None) -> list[ExplainedField]:
    """Explain a config for every installed backend, in schema order.

    Raises:
        ConfigError: The config contradicts the number of ranks, or a backend rejects a key of `native`.
    """
    topology = topology or Topology()
    computed = {"training.global_batch_size": check_batch(cfg.training, topology.world_size)}
    reports = {name: list(translate(cfg, backend=name, topology=topology).report) for name in registry.available()}
    rows, idle = [], unused(cfg)
    for path, _ in leaves(Config):
        value, origin = value_at(cfg, path), origins.describe(cfg, path)
        if value is None and path in computed:
            value, origin = (
                computed[path],
                f"computed for {topology.world_size} {'rank' if topology.world_size == 1 else 'ranks'}",
            )
        rows.append(
            ExplainedField(
                path,
                value,
                origin,
                {name: _image(name, path, cfg, topology, value, idle.get(path)) for name in reports},
            )
        )
    known = {row.path for row in rows}
    for name, lines in reports.items():
        rows += [
            ExplainedField(
                line.path, line.value, origins.describe(cfg, "native"), {name: Image(line.fit, line.native, line.note)}
            )
            for line in lines
            if line.path not in known
        ]
    return rows


def _image(name: str, path: str, cfg: Config, topology: Topology, value: Any, idle: str | None) -> Image:
    rule = registry.get(name).rules[path]
    fit, note = rule.outcome(cfg)
    settings = {} if fit is Fit.UNSUPPORTED else dict(flat(rule.to(cfg, topology)))
    if idle and fit is not Fit.UNSUPPORTED:
        return Image(fit, f"unused: {idle}", note, off=True)
    if settings:
        return Image(fit, ", ".join(f"{key} = {bare(value)}" for key, value in settings.items()), note)
    if fit is Fit.EXACT and path not in _NULL_IS_ON and (value is None or value is False or value in ("none", [], {})):
        return Image(fit, "off", note, off=True)
    return Image(fit, rule.key, note)
