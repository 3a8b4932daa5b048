"""Rows of what a training script does itself around FSDP: the loop, the optimizer, the scheduler. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from unishard.config import Config
from unishard.contract.field_rows import (
    BUFFERS,
    MATMUL,
    logged_by_script,
    none,
    saved_by_script,
    started_elsewhere,
    unlooked,
    write,
)
from unishard.contract.rules import NO_KEY, SCRIPT, Fit, Holds, Rule

__all__ = ["BY_SCRIPT"]


def _without(*names: str) -> Holds:
    return lambda cfg: cfg.optimizer.name not in names


def _exact(cfg: Config) -> bool:
    return cfg.precision.compute != "fp16"


def _endless(cfg: Config) -> bool:
    return not cfg.scheduler.ends


_ADAM = ("adamw", "adam")
_SCALE = ("compute is not fp16", "nothing is scaled")
_OTHER = "belongs to another optimizer"
_OWN_CHECK = "a check of collective calls by the training loop; torch's is TORCH_NCCL_ENABLE_MONITORING"

BY_SCRIPT: Mapping[str, Rule] = {
    "precision.matmul": MATMUL,
    "precision.loss_scale": write("scale the loss with torch.amp.GradScaler", _exact, *_SCALE),
    "precision.initial_loss_scale": write("GradScaler(init_scale=...)", _exact, *_SCALE),
    "precision.loss_scale_growth_interval": write("GradScaler(growth_interval=...)", _exact, *_SCALE),
    "training.micro_batch_size": write("batch_size of the DataLoader"),
    "training.gradient_accumulation_steps": write(
        "divide the loss by it, and step after as many backward calls",
        lambda cfg: cfg.training.gradient_accumulation_steps == 1,
        "1",
    ),
    "training.global_batch_size": Rule(Fit.EXACT, NO_KEY, "follows from the other sizes"),
    "training.gradient_clipping": write(
        "torch.nn.utils.clip_grad_norm_(model.parameters(), ...) before optimizer.step()",
        lambda cfg: cfg.training.gradient_clipping is None,
        "null",
    ),
    "training.nonfinite": unlooked(
        Fit.NEEDS_INPUT, SCRIPT, "check that clip_grad_norm_ returns a finite norm before optimizer.step()"
    ),
    "training.last_window": write(
        "divide the last loss sums by the number of micro-batches that are there, or leave them out",
        lambda cfg: cfg.training.gradient_accumulation_steps == 1,
        "without accumulation",
        "every window is full",
    ),
    "training.buffers": BUFFERS,
    "training.seed": write("torch.manual_seed(...), and the generator of the sampler"),
    "optimizer.name": write("build it after fully_shard"),
    "optimizer.lr": write("argument of the optimizer"),
    "optimizer.betas": write("argument of the optimizer", _without(*_ADAM, "lion"), "without betas", _OTHER),
    "optimizer.eps": write("argument of the optimizer", _without(*_ADAM, "adagrad"), "without eps", _OTHER),
    "optimizer.amsgrad": write("argument of the optimizer", lambda cfg: not cfg.optimizer.amsgrad, "false"),
    "optimizer.momentum": write("argument of the optimizer", lambda cfg: not cfg.optimizer.momentum, "0"),
    "optimizer.nesterov": write("argument of the optimizer", lambda cfg: not cfg.optimizer.nesterov, "false"),
    "optimizer.weight_decay": write("argument of the optimizer"),
    "optimizer.no_decay": write("parameter groups of the optimizer", lambda cfg: not cfg.optimizer.no_decay, "empty"),
    "optimizer.groups": write("parameter groups of the optimizer", lambda cfg: not cfg.optimizer.groups, "empty"),
    "scheduler.name": write(
        "torch.optim.lr_scheduler.LambdaLR, stepped after each update",
        lambda cfg: cfg.scheduler.name == "constant" and not cfg.scheduler.warmup_steps,
        "constant without warm-up",
    ),
    "scheduler.warmup_steps": write("part of the schedule", lambda cfg: not cfg.scheduler.warmup_steps, "0"),
    "scheduler.warmup_type": write("part of the schedule", lambda cfg: not cfg.scheduler.warmup_steps, "no warm-up"),
    "scheduler.warmup_start_ratio": write(
        "part of the schedule", lambda cfg: not cfg.scheduler.warmup_steps, "no warm-up"
    ),
    "scheduler.delay_steps": write("part of the schedule", lambda cfg: not cfg.scheduler.delay_steps, "0"),
    "scheduler.total_steps": write("part of the schedule", _endless, "without an end"),
    "scheduler.min_lr_ratio": write("part of the schedule", _endless, "without an end"),
    "communication.reduce_bucket_size": none("affects only time; FSDP2 reduces the gradients of a unit together"),
    "communication.prefetch_bucket_size": none("affects only time; FSDP2 prefetches the next unit"),
    "communication.overlap": none(
        "affects only time; FSDP2 always overlaps", lambda cfg: cfg.communication.overlap, "true"
    ),
    "communication.desync_check": none(_OWN_CHECK),
    "communication.desync_timeout": none(_OWN_CHECK),
    "compile.mode": write(
        "block.compile() before fully_shard, or model.compile()", lambda cfg: cfg.compile.mode == "none", "none"
    ),
    "compile.backend": write("compile(backend=...)", lambda cfg: cfg.compile.mode == "none", "nothing is compiled"),
    **saved_by_script("torch.distributed.checkpoint.save(...)"),
    **logged_by_script(),
    **started_elsewhere(),
    "strict": none("says how unishard itself takes approximations"),
}
"""Rows by field; `unishard_fsdp.script_rules` puts them in the order of the schema."""
