"""How llm-foundry's training YAML says each field (Composer 0.32, llm-foundry 0.22), in the order of the schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.shard_groups import shard_group_size
from unishard.config.topology import Topology
from unishard.formats.composer import groups
from unishard.formats.composer.saving import SAVING
from unishard.formats.fallbacks import copied, rows, when_default
from unishard.mapping.field_rows import lost, unlooked
from unishard.mapping.rules import NO_KEY, Fit, Holds, Rule, When, unless

__all__ = ["EXPRESSIONS"]

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


def _whole_batch(cfg: Config, topology: Topology) -> Native:
    training = cfg.training
    counted = training.micro_batch_size * training.gradient_accumulation_steps * topology.world_size
    return {"global_train_batch_size": training.global_batch_size or counted}


def _optimizer(key: str, value: Callable[[Config], Any], *names: str) -> Callable[[Config, Topology], Native]:
    """A setting of the optimizers that llm-foundry has, or of these of them."""
    return lambda cfg, topology: {"optimizer": {key: value(cfg)}} if cfg.optimizer.name in (names or _OPTIMIZERS) else {}


def _decay(cfg: Config) -> float:
    return cfg.optimizer.weight_decay * cfg.optimizer.lr


def _total(cfg: Config, topology: Topology) -> Native:
    if cfg.scheduler.total_steps is None:
        return {}
    time = f"{cfg.scheduler.total_steps}ba"
    return {"scheduler": {"t_max": time}, "max_duration": time}


def _constant(cfg: Config) -> bool:
    return cfg.scheduler.name == "constant"


def _not_fp16(cfg: Config) -> bool:
    return cfg.precision.compute != "fp16"


def _scaled(at_default: Holds) -> Rule:
    note = "Composer's GradScaler begins at 65536 and doubles after 2000 updates"
    unscaled = (unless("compute is not fp16", _not_fp16, "nothing is scaled"), unless("as torch's GradScaler", at_default))
    return Rule(Fit.APPROXIMATE, NO_KEY, note, when=unscaled)


_BETWEEN = "FSDP keeps parameters in parts between steps and gathers them in every forward, once instead of twice"
_NO_OFFLOAD = 'Composer raises "FSDP CPU Offload not supported yet"; set offload to none'
_NO_OPTIMIZER = "llm-foundry registers no such optimizer; choose adamw or lion"
_GROUPS = (
    When(
        "no_decay beside groups without a weight_decay",
        groups.unlike,
        Fit.APPROXIMATE,
        "a parameter that both match is in the group alone, so that it decays; write weight_decay in the group",
    ),
)

_OWN: Mapping[str, Rule] = {
    "backend": Rule(
        Fit.UNSUPPORTED,
        "fsdp_config",
        "Composer removed DeepSpeed in 0.28 and runs FSDP alone; give --set backend=fsdp",
        when=(unless("fsdp", lambda cfg: cfg.backend == "fsdp"),),
    ),
    "sharding.strategy": Rule(
        Fit.EXACT,
        "fsdp_config.sharding_strategy",
        "",
        _strategy,
        (
            When(
                "shard_optimizer",
                lambda cfg: cfg.sharding.strategy == "shard_optimizer",
                Fit.APPROXIMATE,
                f"SHARD_GRAD_OP is the nearest; {_BETWEEN}, and reduces gradients on every micro-batch",
            ),
            When(
                "shard_grad_op or hybrid_shard_grad_op",
                lambda cfg: cfg.sharding.within_group == "shard_grad_op",
                Fit.APPROXIMATE,
                f"SHARD_GRAD_OP is the nearest; {_BETWEEN}",
            ),
        ),
    ),
    "sharding.group_size": Rule(
        Fit.EXACT, "fsdp_config.data_parallel_shard_degree, fsdp_config.data_parallel_replicate_degree", "", _group
    ),
    "sharding.reshard_after_forward": Rule(Fit.EXACT, "fsdp_config.sharding_strategy", "", _strategy),
    "sharding.units": Rule(
        Fit.NEEDS_INPUT,
        "fsdp_wrap_fn of the model",
        "let it say true for modules of these classes",
        when=(when_default("sharding.units", "llm-foundry wraps the model's blocks"),),
    ),
    "sharding.conditional_modules": Rule(
        Fit.NEEDS_INPUT,
        "fsdp_wrap_fn of the model",
        "let it say false for modules of these classes",
        when=(when_default("sharding.conditional_modules"),),
    ),
    "precision.compute": Rule(
        Fit.EQUIVALENT,
        "precision",
        "Composer computes under autocast, which keeps norms, softmax and losses in fp32",
        lambda cfg, topology: {"precision": _PRECISIONS[cfg.precision.compute]},
        (when_default("precision.compute"),),
    ),
    "precision.master": Rule(
        Fit.APPROXIMATE,
        "none: always fp32",
        "Composer keeps fp32 masters, which is more exact and takes more memory",
        when=(when_default("precision.master"),),
    ),
    "precision.reduce": Rule(Fit.EXACT, "fsdp_config.mixed_precision", "", _mixed),
    "precision.buffers": Rule(Fit.EXACT, "fsdp_config.mixed_precision", "", _mixed),
    "precision.loss_scale": _scaled(lambda cfg: cfg.precision.loss_scale == "dynamic"),
    "precision.initial_loss_scale": _scaled(lambda cfg: cfg.precision.initial_loss_scale == 65536.0),
    "precision.loss_scale_growth_interval": _scaled(lambda cfg: cfg.precision.loss_scale_growth_interval == 2000),
    "offload.params": lost(_NO_OFFLOAD, lambda cfg: cfg.offload.params == "none", "none"),
    "offload.optimizer": lost(_NO_OFFLOAD, lambda cfg: cfg.offload.optimizer == "none", "none"),
    "offload.pin_memory": Rule(Fit.EXACT, NO_KEY, "nothing is offloaded"),
    "offload.nvme_path": lost(_NO_OFFLOAD, lambda cfg: cfg.offload.nvme_path is None, "null"),
    "activation_checkpointing": Rule(
        Fit.EQUIVALENT,
        "fsdp_config.activation_checkpointing",
        "the model's blocks are computed again as a whole: the same results, other memory and time",
        lambda cfg, topology: _fsdp(
            {"activation_checkpointing": False}
            if cfg.activation_checkpointing == "none"
            else {"activation_checkpointing": True, "activation_checkpointing_reentrant": False}
        ),
        (unless("full or none", lambda cfg: cfg.activation_checkpointing in ("full", "none")),),
    ),
    "training.micro_batch_size": copied("training.micro_batch_size", "device_train_microbatch_size", auto=True),
    "training.gradient_accumulation_steps": Rule(
        Fit.EXACT, "global_train_batch_size", "micro-batch x accumulation x the ranks of --world-size", _whole_batch
    ),
    "training.global_batch_size": Rule(
        Fit.EXACT,
        "global_train_batch_size",
        "",
        lambda cfg, topology: _whole_batch(cfg, topology) if cfg.training.global_batch_size else {},
    ),
    "training.gradient_clipping": Rule(
        Fit.EXACT,
        "algorithms.gradient_clipping",
        "",
        lambda cfg, topology: (
            {}
            if cfg.training.gradient_clipping is None
            else {"algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": cfg.training.gradient_clipping}}}
        ),
    ),
    "training.nonfinite": unlooked(Fit.APPROXIMATE, NO_KEY, "Composer makes the update also when gradients are not finite"),
    "training.last_window": Rule(
        Fit.NEEDS_INPUT,
        "train_loader.drop_last",
        "true drops the batch that is not full, false trains on it",
        when=(when_default("training.gradient_accumulation_steps", "every window is full"),),
    ),
    "training.seed": copied("training.seed", "seed"),
    "optimizer.name": Rule(
        Fit.UNSUPPORTED,
        "optimizer.name",
        _NO_OPTIMIZER,
        lambda cfg, topology: {"optimizer": {"name": _OPTIMIZERS[cfg.optimizer.name]}},
        (unless("adamw or lion", lambda cfg: cfg.optimizer.name in _OPTIMIZERS),),
    ),
    "optimizer.lr": Rule(Fit.EXACT, "optimizer.lr", "", _optimizer("lr", lambda cfg: cfg.optimizer.lr)),
    "optimizer.betas": Rule(Fit.EXACT, "optimizer.betas", "", _optimizer("betas", lambda cfg: list(cfg.optimizer.betas))),
    "optimizer.eps": Rule(Fit.EXACT, "optimizer.eps", "", _optimizer("eps", lambda cfg: cfg.optimizer.eps, "adamw")),
    "optimizer.amsgrad": Rule(
        Fit.EXACT,
        "optimizer.amsgrad",
        "",
        lambda cfg, topology: {"optimizer": {"amsgrad": True}} if cfg.optimizer.amsgrad and cfg.optimizer.name == "adamw" else {},
    ),
    "optimizer.momentum": lost(_NO_OPTIMIZER, lambda cfg: not cfg.optimizer.momentum, "0"),
    "optimizer.nesterov": lost(_NO_OPTIMIZER, lambda cfg: not cfg.optimizer.nesterov, "false"),
    "optimizer.weight_decay": Rule(
        Fit.EQUIVALENT,
        "optimizer.weight_decay",
        "multiplied by the learning rate, since Composer's decay follows the schedule alone",
        _optimizer("weight_decay", _decay),
        (unless("0", lambda cfg: not cfg.optimizer.weight_decay),),
    ),
    "optimizer.no_decay": Rule(Fit.EXACT, "optimizer.param_groups", "", groups.write, _GROUPS),
    "optimizer.groups": Rule(Fit.EXACT, "optimizer.param_groups", "", groups.write, _GROUPS),
    "scheduler.name": Rule(Fit.EXACT, "scheduler.name", "", lambda cfg, topology: {"scheduler": {"name": _SHAPES[cfg.scheduler.name]}}),
    "scheduler.warmup_steps": Rule(
        Fit.EXACT, "scheduler.t_warmup", "", lambda cfg, topology: {"scheduler": {"t_warmup": f"{cfg.scheduler.warmup_steps}ba"}}
    ),
    "scheduler.warmup_type": Rule(
        Fit.APPROXIMATE, "none: always linear", "Composer climbs in a straight line", when=(when_default("scheduler.warmup_type"),)
    ),
    "scheduler.warmup_start_ratio": Rule(
        Fit.APPROXIMATE, "none: always 0", "Composer climbs from 0", when=(when_default("scheduler.warmup_start_ratio"),)
    ),
    "scheduler.delay_steps": Rule(
        Fit.APPROXIMATE, "none: always 0", "Composer begins at once", when=(when_default("scheduler.delay_steps"),)
    ),
    "scheduler.total_steps": Rule(
        Fit.EXACT, "scheduler.t_max, max_duration", "", _total, (unless("constant", _constant, "the loop decides how long"),)
    ),
    "scheduler.min_lr_ratio": Rule(
        Fit.EXACT,
        "scheduler.alpha_f",
        "",
        lambda cfg, topology: {} if _constant(cfg) else {"scheduler": {"alpha_f": cfg.scheduler.min_lr_ratio}},
    ),
    "compile.mode": Rule(
        Fit.EQUIVALENT,
        "compile_config",
        "the whole model is compiled there",
        lambda cfg, topology: {} if cfg.compile.mode == "none" else {"compile_config": {"backend": cfg.compile.backend}},
        (unless("none or full", lambda cfg: cfg.compile.mode != "per_block"),),
    ),
    "compile.backend": Rule(Fit.EXACT, "compile_config.backend"),
}

EXPRESSIONS: Mapping[str, Rule] = rows(_OWN, SAVING)
"""The rows. Only those of fields that a source decides are written."""
