"""Rows for what the training script around Accelerate does itself: the loop, the optimizer, the scheduler. The same for every engine."""

from __future__ import annotations

from collections.abc import Mapping

from unishard.config import Config
from unishard.mapping.field_rows import none, saved_by_script, write
from unishard.mapping.rules import NO_KEY, Fit, Rule, When

__all__ = ["BY_SCRIPT"]


def _optimizer(field: str, *names: str) -> Rule:
    """An argument of the optimizer, which these have."""
    note = f"{field} of the optimizer that Accelerator.prepare gets"
    return write(
        note, lambda cfg: bool(names) and cfg.optimizer.name not in names, "another optimizer", "the optimizer has no such argument"
    )


def _constant(cfg: Config) -> bool:
    return cfg.scheduler.name == "constant"


def _every_step(cfg: Config) -> bool:
    return cfg.training.gradient_accumulation_steps == 1


_SCHEDULE = (
    "the scheduler that Accelerator.prepare gets; Accelerate moves it once for each rank and update (scheduler.py), so count its steps in "
    "updates times ranks, or pass step_scheduler_with_optimizer=False"
)
_OWN_CHECK = "unishard's own check of collective calls"
_ADAM = ("adamw", "adam")

BY_SCRIPT: Mapping[str, Rule] = {
    "training.micro_batch_size": write("batch_size of the DataLoader that Accelerator.prepare gets, of each rank"),
    "training.global_batch_size": none("follows from the other sizes", lambda cfg: cfg.training.global_batch_size is None, "null"),
    "training.last_window": Rule(
        Fit.APPROXIMATE,
        NO_KEY,
        "Accelerate steps at the end of the data and divides by the full window, which gives the last samples less weight",
        when=(
            When("no accumulation", _every_step, Fit.EXACT, "every window is full"),
            When(
                "drop",
                lambda cfg: cfg.training.last_window == "drop",
                Fit.NEEDS_INPUT,
                "leave out the batches that do not fill a window",
            ),
        ),
    ),
    "training.seed": write("accelerate.utils.set_seed(..., device_specific=True), and the seed of the DataLoader"),
    "optimizer.name": write("the optimizer that Accelerator.prepare gets, of torch.optim"),
    "optimizer.lr": _optimizer("lr"),
    "optimizer.betas": _optimizer("betas", *_ADAM, "lion"),
    "optimizer.eps": _optimizer("eps", *_ADAM, "adagrad"),
    "optimizer.amsgrad": write("amsgrad of the optimizer", lambda cfg: not cfg.optimizer.amsgrad, "false"),
    "optimizer.momentum": write("momentum of the optimizer", lambda cfg: not cfg.optimizer.momentum, "0"),
    "optimizer.nesterov": write("nesterov of the optimizer", lambda cfg: not cfg.optimizer.nesterov, "false"),
    "optimizer.weight_decay": _optimizer("weight_decay"),
    "optimizer.no_decay": write("parameter groups of the optimizer", lambda cfg: not cfg.optimizer.no_decay, "empty"),
    "optimizer.groups": write("parameter groups of the optimizer", lambda cfg: not cfg.optimizer.groups, "empty"),
    "scheduler.name": write(_SCHEDULE, lambda cfg: _constant(cfg) and not cfg.scheduler.warmup_steps, "constant without warm-up"),
    "scheduler.warmup_steps": write(_SCHEDULE, lambda cfg: not cfg.scheduler.warmup_steps, "0"),
    "scheduler.warmup_type": write(_SCHEDULE, lambda cfg: not cfg.scheduler.warmup_steps, "no warm-up"),
    "scheduler.warmup_start_ratio": write(_SCHEDULE, lambda cfg: not cfg.scheduler.warmup_steps, "no warm-up"),
    "scheduler.delay_steps": write(_SCHEDULE, lambda cfg: not cfg.scheduler.delay_steps, "0"),
    "scheduler.total_steps": write(_SCHEDULE, _constant, "constant"),
    "scheduler.min_lr_ratio": write(_SCHEDULE, _constant, "constant"),
    "communication.overlap": none("time alone", lambda cfg: cfg.communication.overlap, "true"),
    "communication.desync_check": none(_OWN_CHECK),
    "communication.desync_timeout": none(_OWN_CHECK),
    **saved_by_script("accelerator.save_state(...)"),
    "strict": none("says how unishard itself takes approximations", lambda cfg: not cfg.strict, "false"),
}
"""Rows by field."""
