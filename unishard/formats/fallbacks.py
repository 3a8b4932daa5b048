"""Rows for the fields that a tool has no key for, or leaves to your training script.

A format writes down only where it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from unishard.config import Config, leaves, value_at
from unishard.config.describe import shown
from unishard.config.nested import Native, nested
from unishard.config.topology import Topology
from unishard.contract.field_rows import (
    BUFFERS,
    MATMUL,
    NO_FILES,
    endless,
    logged_by_script,
    saved_by_script,
    started_elsewhere,
)
from unishard.contract.rules import NO_KEY, SCRIPT, Fit, Rule, Setting, When, unless

__all__ = ["FALLBACKS", "NOT_FP16", "copied", "exact", "noted", "row", "rows", "when_default"]

_DEFAULT = Config()


def when_default(path: str, note: str = "") -> When:
    """The case in which a field has the schema's default, which asks for nothing."""
    default = value_at(_DEFAULT, path)
    word = (
        "empty"
        if default in ([], {})
        else f"{default:g}"
        if isinstance(default, float)
        else shown(default).strip("'\"")
    )
    return unless(word, lambda cfg: bool(value_at(cfg, path) == default), note)


def _nothing(cfg: Config, topology: Topology) -> Native:
    return {}


def row(fit: Fit, key: str, note: str, *when: When, to: Setting = _nothing, auto: bool = False) -> Rule:
    """A rule, with its cases after the note."""
    return Rule(fit, key, note, to, when, auto)


def exact(key: str, *when: When, to: Setting = _nothing, auto: bool = False) -> Rule:
    """A rule for a field that fits exactly, but for its cases."""
    return Rule(Fit.EXACT, key, "", to, when, auto)


def copied(path: str, key: str, note: str = "", *, when: tuple[When, ...] = (), auto: bool = False) -> Rule:
    """A row for a field that one key holds as it is; null is left out."""

    def to(cfg: Config, topology: Any) -> dict[str, Any]:
        value = value_at(cfg, path)
        return {} if value is None else nested({key: list(value) if isinstance(value, tuple) else value})

    return row(Fit.EXACT, key, note, *when, to=to, auto=auto)


def noted(notes: Mapping[str, str]) -> dict[str, Rule]:
    """Fallbacks with a note that names what the tool itself has for it."""
    return {path: FALLBACKS[path]._replace(note=note) for path, note in notes.items()}


def rows(*own: Mapping[str, Rule], without: Collection[str] = ()) -> dict[str, Rule]:
    """One row for each leaf of the config, in its order: a format's own, or the fallback.

    Args:
        own: Rows of the format; of two for one field, the last counts.
        without: Fields that an engine's own table says.
    """
    found = dict(FALLBACKS) | {path: row for table in own for path, row in table.items()}
    return {path: found[path] for path, _ in leaves(Config) if path not in without}


def _script(*notes: tuple[str, str]) -> dict[str, Rule]:
    """Rows for what the script must do, whatever the value."""
    return {path: Rule(Fit.NEEDS_INPUT, SCRIPT, note) for path, note in notes}


_SPARED = ("checkpoint.keep_every", "checkpoint.keep_best")


def _asked(fit: Fit, key: str, *notes: tuple[str, str]) -> dict[str, Rule]:
    """Rows that count only where a field does not have the schema's default."""
    return {path: row(fit, key, note, when_default(path)) for path, note in notes}


def _lost(*notes: tuple[str, str]) -> dict[str, Rule]:
    """Rows for what may be left out, whatever the value: training is the same."""
    return {path: Rule(Fit.IGNORED, NO_KEY, note) for path, note in notes}


def _no_warmup(cfg: Config) -> bool:
    return not cfg.scheduler.warmup_steps


def _belongs(*names: str) -> tuple[When, ...]:
    """The case of an optimizer that has no such argument."""
    return (
        unless("another optimizer", lambda cfg: cfg.optimizer.name not in names, "the optimizer has no such argument"),
    )


def _scheduled(case: str, holds: Callable[[Config], bool]) -> Rule:
    return row(Fit.NEEDS_INPUT, SCRIPT, "build the learning rate schedule", unless(case, holds))


NOT_FP16 = unless("compute is not fp16", lambda cfg: cfg.precision.compute != "fp16", "nothing is scaled")


def _scaled(path: str, note: str) -> Rule:
    return row(Fit.NEEDS_INPUT, SCRIPT, note, NOT_FP16, when_default(path, "GradScaler's default"))


_GRADSCALER = ("precision.loss_scale", "precision.initial_loss_scale", "precision.loss_scale_growth_interval")
"""Fields that torch's `GradScaler` has."""
_IN_FP32 = unless("compute is fp32", lambda cfg: cfg.precision.compute == "fp32", "everything is in fp32")
_SMALLER = "the same math with smaller units"
_GRADIENTS = "gradients add up in the dtype of the master weights, which is more exact"
_TIME = "affects only time and memory"
_GROUPS = "parameter groups of the optimizer"
_CHECK = "a check of collective calls by the training loop"

FALLBACKS: Mapping[str, Rule] = {
    **_script(
        ("backend", "set up the engine"),
        ("sharding.strategy", "shard the model"),
        ("precision.compute", "compute in this dtype"),
        ("precision.master", "load the model in this dtype"),
        ("training.micro_batch_size", "batch_size of the DataLoader, for each rank"),
        ("training.seed", "seed torch and the DataLoader"),
        ("optimizer.name", "build the optimizer"),
        ("optimizer.lr", "lr of the optimizer"),
        ("optimizer.weight_decay", "weight_decay of the optimizer"),
    ),
    **_asked(
        Fit.NEEDS_INPUT,
        SCRIPT,
        ("sharding.group_size", "build a device mesh with groups of this size"),
        ("sharding.reshard_after_forward", "pass it to fully_shard"),
        ("sharding.units", "shard modules of these classes"),
        ("sharding.conditional_modules", "leave modules of these classes out"),
        ("precision.reduce", "reduce gradients in this dtype"),
        ("precision.buffers", "cast the model's floating-point buffers before it is wrapped"),
        ("offload.params", "offload the parameters"),
        ("offload.optimizer", "offload the optimizer state"),
        ("activation_checkpointing", "checkpoint the model's blocks"),
        ("training.gradient_accumulation_steps", "accumulate gradients over micro-batches"),
        ("training.gradient_clipping", "clip the gradient norm"),
        ("training.last_window", "drop the batches that do not fill an accumulation window"),
        ("optimizer.amsgrad", "amsgrad of the optimizer"),
        ("optimizer.momentum", "momentum of the optimizer"),
        ("optimizer.nesterov", "nesterov of the optimizer"),
        ("optimizer.no_decay", _GROUPS),
        ("optimizer.groups", _GROUPS),
        ("compile.mode", "call torch.compile"),
        ("compile.backend", "pass it to torch.compile"),
    ),
    **_asked(Fit.APPROXIMATE, NO_KEY, *((path, "the tool keeps the newest or all: all are kept") for path in _SPARED)),
    "precision.matmul": MATMUL,
    "precision.cast_inputs": row(
        Fit.NEEDS_INPUT,
        SCRIPT,
        "cast only these inputs to the compute dtype",
        _IN_FP32,
        when_default("precision.cast_inputs"),
    ),
    "precision.keep_fp32": row(
        Fit.NEEDS_INPUT,
        SCRIPT,
        "leave these parameters in fp32, and cast around their modules",
        _IN_FP32,
        unless(
            "auto or empty",
            lambda cfg: cfg.precision.keep_fp32 in ("auto", []),
            "unless the class of the model names some",
        ),
    ),
    "training.buffers": BUFFERS,
    "training.nonfinite": row(
        Fit.APPROXIMATE,
        NO_KEY,
        "updates with infinite or NaN gradients are made",
        unless("ignore", lambda cfg: cfg.training.nonfinite == "ignore"),
    ),
    **_asked(
        Fit.IGNORED,
        NO_KEY,
        ("offload.pin_memory", f"{_TIME}; FSDP always pins"),
        ("training.global_batch_size", "follows from the other sizes"),
    ),
    **_lost(
        ("communication.reduce_bucket_size", f"{_TIME}; FSDP reduces the gradients of a unit together"),
        ("communication.prefetch_bucket_size", f"{_TIME}; FSDP gathers the next unit ahead"),
        ("communication.overlap", f"{_TIME}; torch always overlaps"),
        ("communication.desync_check", _CHECK),
        ("communication.desync_timeout", _CHECK),
        ("strict", "controls unishard's own report"),
    ),
    **{path: row for path, row in saved_by_script("your save function").items() if path not in _SPARED},
    **logged_by_script(),
    **started_elsewhere(),
    "sharding.min_unit_params": row(Fit.EQUIVALENT, NO_KEY, _SMALLER, when_default("sharding.min_unit_params")),
    "precision.accumulate": row(
        Fit.APPROXIMATE,
        "none: the dtype of the master weights",
        _GRADIENTS,
        unless("that of master", lambda cfg: cfg.precision.accumulate == cfg.precision.master),
    ),
    "precision.loss_scale": _scaled(
        _GRADSCALER[0], "torch's GradScaler has only a dynamic scale; scale the loss yourself"
    ),
    "precision.initial_loss_scale": _scaled(_GRADSCALER[1], "init_scale of torch's GradScaler"),
    "precision.loss_scale_growth_interval": _scaled(_GRADSCALER[2], "growth_interval of torch's GradScaler"),
    "offload.nvme_path": row(Fit.UNSUPPORTED, NO_KEY, NO_FILES, when_default("offload.nvme_path")),
    "optimizer.betas": row(Fit.NEEDS_INPUT, SCRIPT, "betas of the optimizer", *_belongs("adamw", "adam", "lion")),
    "optimizer.eps": row(Fit.NEEDS_INPUT, SCRIPT, "eps of the optimizer", *_belongs("adamw", "adam", "adagrad")),
    "scheduler.name": _scheduled(
        "constant without warmup", lambda cfg: cfg.scheduler.name == "constant" and _no_warmup(cfg)
    ),
    "scheduler.warmup_steps": _scheduled("0", _no_warmup),
    "scheduler.warmup_type": _scheduled("no warmup", _no_warmup),
    "scheduler.warmup_start_ratio": _scheduled("no warmup", _no_warmup),
    "scheduler.delay_steps": _scheduled("0", lambda cfg: not cfg.scheduler.delay_steps),
    "scheduler.total_steps": _scheduled("without an end", endless),
    "scheduler.min_lr_ratio": _scheduled("without an end", endless),
    "native": row(
        Fit.APPROXIMATE,
        NO_KEY,
        "no key for settings of the engine itself; set them in your training script",
        unless("nothing for the engine", lambda cfg: not cfg.native.get(cfg.backend)),
    ),
}
"""By field."""
