"""How llm-foundry's training YAML says each field (Composer 0.32, llm-foundry 0.22), in the order of the schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.shard_groups import shard_group_size
from unishard.config.topology import Topology
from unishard.contract.field_rows import NO_INVERSE_SQRT, RESHARDS_TO_ALL, endless, lost, started_elsewhere, unlooked
from unishard.contract.rules import NO_KEY, SCRIPT, Fit, Holds, Rule, When, unless
from unishard.formats.composer import groups
from unishard.formats.composer.logs import LOGS
from unishard.formats.composer.saving import SAVING
from unishard.formats.fallbacks import copied, exact, row, rows, when_default

__all__ = ["RULES"]

_PRECISIONS = {"fp32": "fp32", "bf16": "amp_bf16", "fp16": "amp_fp16"}
_OPTIMIZERS = {"adamw": "decoupled_adamw", "lion": "decoupled_lionw"}
_SHAPES = {"constant": "constant_with_warmup", "linear": "linear_decay_with_warmup", "cosine": "cosine_with_warmup"}


def _fsdp(settings: Native) -> Native:
    return {"fsdp_config": settings}


def _strategy(cfg: Config, topology: Topology) -> Native:
    keeps = cfg.sharding.within_group != "full_shard" or not cfg.sharding.reshard_after_forward
    if cfg.sharding.strategy == "no_shard":
        return _fsdp({"sharding_strategy": "NO_SHARD"})
    if cfg.sharding.hybrid:
        return _fsdp({"sharding_strategy": "_HYBRID_SHARD_ZERO2" if keeps else "HYBRID_SHARD"})
    return _fsdp({"sharding_strategy": "SHARD_GRAD_OP" if keeps else "FULL_SHARD"})


def _group(cfg: Config, topology: Topology) -> Native:
    if not cfg.sharding.hybrid or cfg.sharding.group_size is None:
        return {}
    groups, rest = divmod(topology.world_size, shard_group_size(cfg, topology))
    degrees: Native = {"data_parallel_shard_degree": cfg.sharding.group_size}
    return _fsdp(degrees if rest or not groups else degrees | {"data_parallel_replicate_degree": groups})


def _mixed(cfg: Config, topology: Topology) -> Native:
    """PURE and DEFAULT also cast the buffers, and FULL casts nothing."""
    compute, reduce, buffers = cfg.precision.compute, cfg.precision.reduce, cfg.precision.buffers
    if compute == "fp32" and buffers == "keep":
        return _fsdp({"mixed_precision": "FULL"})
    if buffers == compute:
        return _fsdp({"mixed_precision": "DEFAULT" if reduce == "fp32" else "PURE"})
    formats = {"param_dtype": compute, "reduce_dtype": reduce}
    return _fsdp({"mixed_precision": formats if buffers == "keep" else formats | {"buffer_dtype": buffers}})


def _global_batch(cfg: Config, topology: Topology) -> Native:
    training = cfg.training
    counted = training.micro_batch_size * training.gradient_accumulation_steps * topology.world_size
    return {"global_train_batch_size": training.global_batch_size or counted}


def _optimizer(key: str, value: Callable[[Config], Any], *names: str) -> Callable[[Config, Topology], Native]:
    """A setting of the optimizers that llm-foundry has, or of these of them."""
    return lambda cfg, topology: (
        {"optimizer": {key: value(cfg)}} if cfg.optimizer.name in (names or _OPTIMIZERS) else {}
    )


def _decay(cfg: Config) -> float:
    return cfg.optimizer.weight_decay * cfg.optimizer.lr


def _total(cfg: Config, topology: Topology) -> Native:
    if cfg.scheduler.total_steps is None:
        return {}
    time = f"{cfg.scheduler.total_steps}ba"
    return {"scheduler": {"t_max": time}, "max_duration": time}


def _not_fp16(cfg: Config) -> bool:
    return cfg.precision.compute != "fp16"


def _scaled(at_default: Holds) -> Rule:
    note = "Composer's GradScaler begins at 65536 and doubles after 2000 updates"
    unscaled = (
        unless("compute is not fp16", _not_fp16, "nothing is scaled"),
        unless("as torch's GradScaler", at_default),
    )
    return row(Fit.APPROXIMATE, NO_KEY, note, *unscaled)


_BETWEEN = "FSDP gathers parameters in every forward"
_NO_OFFLOAD = 'Composer raises "FSDP CPU Offload not supported yet"; set offload to none'
_NO_OPTIMIZER = "llm-foundry registers no such optimizer; choose adamw or lion"
_GROUPS = (
    When(
        "no_decay beside groups without a weight_decay",
        groups.unlike,
        Fit.APPROXIMATE,
        "a parameter in both is only in the group, so it decays; set weight_decay there",
    ),
)

_OWN: Mapping[str, Rule] = {
    "backend": row(
        Fit.UNSUPPORTED,
        "fsdp_config",
        "Composer removed DeepSpeed in 0.28; add --set backend=fsdp",
        unless("fsdp", lambda cfg: cfg.backend == "fsdp"),
    ),
    "sharding.strategy": exact(
        "fsdp_config.sharding_strategy",
        When(
            "shard_optimizer",
            lambda cfg: cfg.sharding.strategy == "shard_optimizer",
            Fit.APPROXIMATE,
            f"nearest is SHARD_GRAD_OP; {_BETWEEN}, and reduces gradients on every micro-batch",
        ),
        When(
            "shard_grad_op or hybrid_shard_grad_op",
            lambda cfg: cfg.sharding.within_group == "shard_grad_op",
            Fit.APPROXIMATE,
            f"nearest is SHARD_GRAD_OP; {_BETWEEN}",
        ),
        to=_strategy,
    ),
    "sharding.group_size": exact(
        "fsdp_config.data_parallel_shard_degree, fsdp_config.data_parallel_replicate_degree", to=_group
    ),
    "sharding.reshard_after_forward": exact("fsdp_config.sharding_strategy", RESHARDS_TO_ALL, to=_strategy),
    "sharding.units": row(
        Fit.NEEDS_INPUT,
        "fsdp_wrap_fn of the model",
        "let it say true for modules of these classes",
        when_default("sharding.units", "llm-foundry wraps the model's blocks"),
    ),
    "sharding.conditional_modules": row(
        Fit.NEEDS_INPUT,
        "fsdp_wrap_fn of the model",
        "let it say false for modules of these classes",
        when_default("sharding.conditional_modules"),
    ),
    "precision.compute": row(
        Fit.EQUIVALENT,
        "precision",
        "Composer computes under autocast, which keeps norms, softmax and losses in fp32",
        when_default("precision.compute"),
        to=lambda cfg, topology: {"precision": _PRECISIONS[cfg.precision.compute]},
    ),
    "precision.master": row(
        Fit.APPROXIMATE,
        "none: always fp32",
        "Composer keeps fp32 master weights: more exact, more memory",
        when_default("precision.master"),
    ),
    "precision.matmul": row(
        Fit.NEEDS_INPUT,
        SCRIPT,
        "Composer allows TF32; pass device=DeviceGPU(allow_tf32=False) to the Trainer",
        unless("tf32", lambda cfg: cfg.precision.matmul == "tf32", "Composer allows TF32"),
        unless("keep in bf16 or fp16", lambda cfg: cfg.precision.matmul == "keep" and cfg.precision.compute != "fp32"),
    ),
    "precision.reduce": exact("fsdp_config.mixed_precision", to=_mixed),
    "precision.buffers": exact("fsdp_config.mixed_precision", to=_mixed),
    "precision.loss_scale": _scaled(lambda cfg: cfg.precision.loss_scale == "dynamic"),
    "precision.initial_loss_scale": _scaled(lambda cfg: cfg.precision.initial_loss_scale == 65536.0),
    "precision.loss_scale_growth_interval": _scaled(lambda cfg: cfg.precision.loss_scale_growth_interval == 2000),
    "offload.params": lost(_NO_OFFLOAD, lambda cfg: cfg.offload.params == "none", "none"),
    "offload.optimizer": lost(_NO_OFFLOAD, lambda cfg: cfg.offload.optimizer == "none", "none"),
    "offload.pin_memory": Rule(Fit.EXACT, NO_KEY, "nothing is offloaded"),
    "offload.nvme_path": lost(_NO_OFFLOAD, lambda cfg: cfg.offload.nvme_path is None, "null"),
    "activation_checkpointing": row(
        Fit.EQUIVALENT,
        "fsdp_config.activation_checkpointing",
        "full blocks are recomputed: the same results, other memory and time",
        unless("full or none", lambda cfg: cfg.activation_checkpointing in ("full", "none")),
        to=lambda cfg, topology: _fsdp(
            {"activation_checkpointing": False}
            if cfg.activation_checkpointing == "none"
            else {"activation_checkpointing": True, "activation_checkpointing_reentrant": False}
        ),
    ),
    "training.micro_batch_size": copied("training.micro_batch_size", "device_train_microbatch_size", auto=True),
    "training.gradient_accumulation_steps": Rule(
        Fit.EXACT, "global_train_batch_size", "micro-batch x accumulation x the ranks of --world-size", _global_batch
    ),
    "training.global_batch_size": exact(
        "global_train_batch_size",
        to=lambda cfg, topology: _global_batch(cfg, topology) if cfg.training.global_batch_size else {},
    ),
    "training.gradient_clipping": exact(
        "algorithms.gradient_clipping",
        to=lambda cfg, topology: (
            {}
            if cfg.training.gradient_clipping is None
            else {
                "algorithms": {
                    "gradient_clipping": {"clipping_type": "norm", "clipping_threshold": cfg.training.gradient_clipping}
                }
            }
        ),
    ),
    "training.nonfinite": unlooked(
        Fit.APPROXIMATE, NO_KEY, "Composer makes the update also when gradients are not finite"
    ),
    "training.last_window": row(
        Fit.NEEDS_INPUT,
        "train_loader.drop_last",
        "true drops the batch that is not full, false trains on it",
        when_default("training.gradient_accumulation_steps", "every window is full"),
    ),
    "training.seed": copied("training.seed", "seed"),
    "optimizer.name": row(
        Fit.UNSUPPORTED,
        "optimizer.name",
        _NO_OPTIMIZER,
        unless("adamw or lion", lambda cfg: cfg.optimizer.name in _OPTIMIZERS),
        to=lambda cfg, topology: {"optimizer": {"name": _OPTIMIZERS[cfg.optimizer.name]}},
    ),
    "optimizer.lr": exact("optimizer.lr", to=_optimizer("lr", lambda cfg: cfg.optimizer.lr)),
    "optimizer.betas": exact("optimizer.betas", to=_optimizer("betas", lambda cfg: list(cfg.optimizer.betas))),
    "optimizer.eps": exact("optimizer.eps", to=_optimizer("eps", lambda cfg: cfg.optimizer.eps, "adamw")),
    "optimizer.amsgrad": exact(
        "optimizer.amsgrad",
        to=lambda cfg, topology: (
            {"optimizer": {"amsgrad": True}} if cfg.optimizer.amsgrad and cfg.optimizer.name == "adamw" else {}
        ),
    ),
    "optimizer.momentum": lost(_NO_OPTIMIZER, lambda cfg: not cfg.optimizer.momentum, "0"),
    "optimizer.nesterov": lost(_NO_OPTIMIZER, lambda cfg: not cfg.optimizer.nesterov, "false"),
    "optimizer.weight_decay": row(
        Fit.EQUIVALENT,
        "optimizer.weight_decay",
        "times the learning rate: Composer's decay follows only the schedule",
        unless("0", lambda cfg: not cfg.optimizer.weight_decay),
        to=_optimizer("weight_decay", _decay),
    ),
    "optimizer.no_decay": exact("optimizer.param_groups", *_GROUPS, to=groups.write),
    "optimizer.groups": exact("optimizer.param_groups", *_GROUPS, to=groups.write),
    "scheduler.name": exact(
        "scheduler.name", NO_INVERSE_SQRT, to=lambda cfg, topology: {"scheduler": {"name": _SHAPES[cfg.scheduler.name]}}
    ),
    "scheduler.warmup_steps": exact(
        "scheduler.t_warmup", to=lambda cfg, topology: {"scheduler": {"t_warmup": f"{cfg.scheduler.warmup_steps}ba"}}
    ),
    "scheduler.warmup_type": row(
        Fit.APPROXIMATE, "none: always linear", "Composer warms up linearly", when_default("scheduler.warmup_type")
    ),
    "scheduler.warmup_start_ratio": row(
        Fit.APPROXIMATE, "none: always 0", "Composer warms up from 0", when_default("scheduler.warmup_start_ratio")
    ),
    "scheduler.delay_steps": row(
        Fit.APPROXIMATE, "none: always 0", "Composer begins at once", when_default("scheduler.delay_steps")
    ),
    "scheduler.total_steps": exact(
        "scheduler.t_max, max_duration", unless("without an end", endless, "the loop decides how long"), to=_total
    ),
    "scheduler.min_lr_ratio": exact(
        "scheduler.alpha_f",
        to=lambda cfg, topology: {} if endless(cfg) else {"scheduler": {"alpha_f": cfg.scheduler.min_lr_ratio}},
    ),
    "compile.mode": row(
        Fit.EQUIVALENT,
        "compile_config",
        "the full model is compiled there",
        unless("none or full", lambda cfg: cfg.compile.mode != "per_block"),
        to=lambda cfg, topology: (
            {} if cfg.compile.mode == "none" else {"compile_config": {"backend": cfg.compile.backend}}
        ),
    ),
    "compile.backend": exact("compile_config.backend"),
}

_NO_RENDEZVOUS = "Composer's launcher has no such option; or start the script with torchrun"
_LAUNCH = started_elsewhere(
    nodes="pass composer --world_size, the ranks of all hosts",
    processes_per_node="pass composer -n",
    endpoint="pass composer --master_addr and --master_port",
    **dict.fromkeys(("rendezvous", "rendezvous_id", "rendezvous_options", "max_restarts"), _NO_RENDEZVOUS),
)

RULES: Mapping[str, Rule] = rows(_OWN, SAVING, LOGS, _LAUNCH)
"""The rows. Only those of fields that a source decides are written."""
