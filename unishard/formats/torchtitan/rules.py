"""How torchtitan 0.2's TOML says each field, in the order of the schema."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.shard_groups import shard_group_size
from unishard.config.topology import Topology
from unishard.contract.field_rows import (
    NO_INVERSE_SQRT,
    RESHARDS_TO_ALL,
    endless,
    lost,
    moved_together,
    none,
    started_elsewhere,
)
from unishard.contract.rules import Fit, Holds, Rule, When, unless
from unishard.formats.fallbacks import copied, exact, row, rows, when_default
from unishard.formats.torchtitan.logs import LOGS
from unishard.formats.torchtitan.saving import SAVING

__all__ = ["RULES"]

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_ADAM = {"adamw": "AdamW", "adam": "Adam"}


def _training(**values: Any) -> Native:
    return {"training": values}


def _degrees(cfg: Config, topology: Topology) -> Native:
    """Both degrees; the number of copies is left out where the ranks are not known."""
    shard, replicate = -1, 1
    if cfg.sharding.strategy == "no_shard":
        shard, replicate = 1, topology.world_size
    if cfg.sharding.hybrid:
        shard = shard_group_size(cfg, topology)
        if shard == 1:
            return {"parallelism": {}}
        replicate, rest = divmod(topology.world_size, shard)
        if rest or not replicate:
            return {"parallelism": {"data_parallel_shard_degree": shard}}
    return {"parallelism": {"data_parallel_replicate_degree": replicate, "data_parallel_shard_degree": shard}}


def _reshard(cfg: Config, topology: Topology) -> Native:
    if cfg.sharding.strategy == "no_shard":
        return {}
    drops = cfg.sharding.within_group == "full_shard" and cfg.sharding.reshard_after_forward
    return {"parallelism": {"fsdp_reshard_after_forward": "default" if drops else "never"}}


def _checkpointing(cfg: Config, topology: Topology) -> Native:
    mode = cfg.activation_checkpointing if isinstance(cfg.activation_checkpointing, str) else "full"
    option = {"selective_ac_option": "op"} if mode == "selective" else {}
    return {"activation_checkpoint": {"mode": mode} | option}


def _global_batch(cfg: Config, topology: Topology) -> Native:
    training = cfg.training
    if training.global_batch_size is None and training.gradient_accumulation_steps == 1:
        return _training(global_batch_size=-1)
    counted = training.micro_batch_size * training.gradient_accumulation_steps * topology.world_size
    return _training(global_batch_size=training.global_batch_size or counted)


def _optimizer(**values: Callable[[Config], Any]) -> Callable[[Config, Topology], Native]:
    return lambda cfg, topology: (
        {"optimizer": {key: value(cfg) for key, value in values.items()}} if cfg.optimizer.name in _ADAM else {}
    )


def _constant(cfg: Config) -> bool:
    return cfg.scheduler.name == "constant"


def _shape(cfg: Config, topology: Topology) -> Native:
    return {"lr_scheduler": {"decay_ratio": 0.0} if _constant(cfg) else {"decay_type": cfg.scheduler.name}}


def _same_warmup(cfg: Config) -> bool:
    """Whether torchtitan's climb is this one: without a fall, one update longer and from one part of it."""
    steps = cfg.scheduler.warmup_steps
    return (
        _constant(cfg) and cfg.scheduler.warmup_type == "linear" and cfg.scheduler.warmup_start_ratio == 1 / (steps + 1)
    )


def _warmup(cfg: Config, topology: Topology) -> Native:
    steps = cfg.scheduler.warmup_steps
    return {"lr_scheduler": {"warmup_steps": steps + 1 if steps and _same_warmup(cfg) else steps}}


def _no_warmup(cfg: Config) -> bool:
    return not cfg.scheduler.warmup_steps


def _code(what: str, off: Holds, case: str, why: str = "") -> Rule:
    """A field that the code of the model must honor."""
    return row(Fit.NEEDS_INPUT, "the model's parallelize function", what, unless(case, off, why))


def _scaled() -> Rule:
    return lost(_NO_FP16, lambda cfg: cfg.precision.compute != "fp16", "compute is not fp16")


_NO_FP16 = "torchtitan does not scale the loss; choose bf16"
_NO_OPTIMIZER = "torchtitan has only Adam and AdamW; choose one of them"
_NO_GROUPS = "torchtitan treats all parameters alike; remove it"
_WARMUP = "update i uses (i + 1) / warmup_steps of the rate there, and i / warmup_steps here"
_BETWEEN = "FSDP gathers parameters in every forward"

_OWN: Mapping[str, Rule] = {
    "backend": row(
        Fit.UNSUPPORTED,
        "parallelism",
        "torchtitan runs only FSDP; add --set backend=fsdp",
        unless("fsdp", lambda cfg: cfg.backend == "fsdp"),
    ),
    "sharding.strategy": exact(
        "parallelism.data_parallel_shard_degree, parallelism.data_parallel_replicate_degree",
        When(
            "shard_optimizer, shard_grad_op or hybrid_shard_grad_op",
            lambda cfg: cfg.sharding.within_group in ("shard_optimizer", "shard_grad_op"),
            Fit.APPROXIMATE,
            f"fsdp_reshard_after_forward never is the nearest; {_BETWEEN}",
        ),
        to=lambda cfg, topology: {
            "parallelism": _degrees(cfg, topology)["parallelism"] | _reshard(cfg, topology).get("parallelism", {})
        },
    ),
    "sharding.group_size": Rule(
        Fit.EXACT, "parallelism.data_parallel_shard_degree", "a divisor of the ranks (--world-size)"
    ),
    "sharding.reshard_after_forward": exact("parallelism.fsdp_reshard_after_forward", RESHARDS_TO_ALL, to=_reshard),
    "sharding.units": _code(
        "shard modules of these classes", lambda cfg: cfg.sharding.units == "auto", "auto", "the model's blocks"
    ),
    "sharding.conditional_modules": _code(
        "leave modules of these classes out", lambda cfg: not cfg.sharding.conditional_modules, "empty"
    ),
    "precision.compute": exact(
        "training.mixed_precision_param",
        When("fp16", lambda cfg: cfg.precision.compute == "fp16", Fit.UNSUPPORTED, _NO_FP16),
        to=lambda cfg, topology: _training(mixed_precision_param=_DTYPES[cfg.precision.compute]),
    ),
    "precision.master": exact(
        "training.dtype",
        When("fp16", lambda cfg: cfg.precision.master == "fp16", Fit.UNSUPPORTED, _NO_FP16),
        to=lambda cfg, topology: _training(dtype=_DTYPES[cfg.precision.master]),
    ),
    "precision.reduce": exact(
        "training.mixed_precision_reduce",
        When(
            "not fp32",
            lambda cfg: cfg.precision.reduce != "fp32",
            Fit.APPROXIMATE,
            "torchtitan sums gradients in fp32, which is more exact and sends twice as much",
        ),
        to=lambda cfg, topology: _training(mixed_precision_reduce="float32"),
    ),
    "precision.buffers": _code("cast the buffers", lambda cfg: cfg.precision.buffers == "keep", "keep"),
    "precision.loss_scale": _scaled(),
    "precision.initial_loss_scale": _scaled(),
    "precision.loss_scale_growth_interval": _scaled(),
    **moved_together(
        "training.enable_cpu_offload",
        lambda cfg, topology: _training(enable_cpu_offload="cpu" in (cfg.offload.params, cfg.offload.optimizer)),
    ),
    "activation_checkpointing": row(
        Fit.EQUIVALENT,
        "activation_checkpoint.mode",
        "the same results, other memory and time",
        unless("none or full", lambda cfg: cfg.activation_checkpointing in ("none", "full")),
        to=_checkpointing,
    ),
    "training.micro_batch_size": copied("training.micro_batch_size", "training.local_batch_size"),
    "training.gradient_accumulation_steps": Rule(
        Fit.EXACT, "training.global_batch_size", "-1 for one micro-batch of each rank", _global_batch
    ),
    "training.global_batch_size": exact(
        "training.global_batch_size",
        to=lambda cfg, topo: _global_batch(cfg, topo) if cfg.training.global_batch_size else {},
    ),
    "training.gradient_clipping": Rule(
        Fit.EXACT,
        "training.max_norm",
        "inf for no clipping",
        lambda cfg, topology: _training(
            max_norm=math.inf if cfg.training.gradient_clipping is None else cfg.training.gradient_clipping
        ),
    ),
    "training.last_window": none("torchtitan's data begin again and do not end"),
    "training.seed": copied("training.seed", "debug.seed"),
    "optimizer.name": row(
        Fit.UNSUPPORTED,
        "optimizer.name",
        _NO_OPTIMIZER,
        unless("adamw or adam", lambda cfg: cfg.optimizer.name in _ADAM),
        to=lambda cfg, topology: {"optimizer": {"name": _ADAM[cfg.optimizer.name]}},
    ),
    "optimizer.lr": exact("optimizer.lr", to=_optimizer(lr=lambda cfg: cfg.optimizer.lr)),
    "optimizer.betas": exact(
        "optimizer.beta1, optimizer.beta2",
        to=_optimizer(beta1=lambda cfg: cfg.optimizer.betas[0], beta2=lambda cfg: cfg.optimizer.betas[1]),
    ),
    "optimizer.eps": exact("optimizer.eps", to=_optimizer(eps=lambda cfg: cfg.optimizer.eps)),
    "optimizer.amsgrad": lost(
        "torchtitan has no such setting; write false", lambda cfg: not cfg.optimizer.amsgrad, "false"
    ),
    "optimizer.momentum": lost(_NO_OPTIMIZER, lambda cfg: not cfg.optimizer.momentum, "0"),
    "optimizer.nesterov": lost(_NO_OPTIMIZER, lambda cfg: not cfg.optimizer.nesterov, "false"),
    "optimizer.weight_decay": exact(
        "optimizer.weight_decay", to=_optimizer(weight_decay=lambda cfg: cfg.optimizer.weight_decay)
    ),
    "optimizer.no_decay": lost(_NO_GROUPS, lambda cfg: not cfg.optimizer.no_decay, "empty"),
    "optimizer.groups": lost(_NO_GROUPS, lambda cfg: not cfg.optimizer.groups, "empty"),
    "scheduler.name": exact("lr_scheduler.decay_type, lr_scheduler.decay_ratio", NO_INVERSE_SQRT, to=_shape),
    "scheduler.warmup_steps": row(
        Fit.APPROXIMATE,
        "lr_scheduler.warmup_steps",
        _WARMUP,
        unless("0", _no_warmup),
        unless("the same warmup", _same_warmup),
        to=_warmup,
    ),
    "scheduler.warmup_type": row(
        Fit.APPROXIMATE, "none: always linear", "torchtitan warms up linearly", when_default("scheduler.warmup_type")
    ),
    "scheduler.warmup_start_ratio": row(
        Fit.APPROXIMATE,
        "none: 1 / warmup_steps",
        "torchtitan warms up from 1/warmup_steps",
        when_default("scheduler.warmup_start_ratio"),
        unless("the same warmup", _same_warmup),
    ),
    "scheduler.delay_steps": row(
        Fit.APPROXIMATE, "none: always 0", "torchtitan begins at once", when_default("scheduler.delay_steps")
    ),
    "scheduler.total_steps": copied(
        "scheduler.total_steps",
        "training.steps",
        when=(unless("without an end", endless, "the loop decides how long"),),
    ),
    "scheduler.min_lr_ratio": exact(
        "lr_scheduler.min_lr_factor",
        to=lambda cfg, topology: (
            {} if endless(cfg) else {"lr_scheduler": {"min_lr_factor": cfg.scheduler.min_lr_ratio}}
        ),
    ),
    "compile.mode": row(
        Fit.EQUIVALENT,
        "compile.enable",
        "torchtitan compiles each block",
        unless("none or per_block", lambda cfg: cfg.compile.mode != "full"),
        to=lambda cfg, topology: {"compile": {"enable": cfg.compile.mode != "none"}},
    ),
    "compile.backend": exact(
        "compile.backend",
        to=lambda cfg, topology: {} if cfg.compile.mode == "none" else {"compile": {"backend": cfg.compile.backend}},
    ),
}

_LAUNCH = started_elsewhere(processes_per_node="set NGPU for run_train.sh, or pass torchrun --nproc-per-node")

RULES: Mapping[str, Rule] = rows(_OWN, SAVING, LOGS, _LAUNCH)
"""The rows. Only those of fields that a source decides are written."""
