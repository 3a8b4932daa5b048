"""How Lightning's `FSDPStrategy` and `DDPStrategy` (2.6.6), with the Trainer around them, say each field: one row for
each leaf.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.shard_groups import shard_group_size
from unishard.config.topology import Topology
from unishard.contract.fallbacks import rows
from unishard.contract.field_rows import (
    BEFORE_EACH_FORWARD,
    BUFFERS,
    RESHARDS_TO_ALL,
    exact,
    moved_together,
    row,
    when_default,
)
from unishard.contract.rules import (
    NO_KEY,
    SCRIPT,
    Fit,
    Rule,
    approximate,
    equivalent,
    is_,
    needs_input,
    sharded,
    unless,
)
from unishard.formats.lightning.precision import PRECISION
from unishard.formats.lightning.saving import SAVING
from unishard.formats.lightning.trainer_rules import LAUNCHING, MODULE, RECIPE, TRAINING, UNCLIPPED, trainer

CLASSES = {
    "ddp": "lightning.pytorch.strategies.DDPStrategy",
    "fsdp": "lightning.pytorch.strategies.FSDPStrategy",
    "deepspeed": "lightning.pytorch.strategies.DeepSpeedStrategy",
}


def strategy(runs: str, **arguments: Any) -> Native:
    """A strategy's class and arguments."""
    return trainer(strategy={"class_path": CLASSES[runs], **({"init_args": arguments} if arguments else {})})


def _keeps(cfg: Config) -> bool:
    """Whether FSDP leaves parameters gathered after forward."""
    return cfg.sharding.within_group == "shard_grad_op" or not cfg.sharding.reshard_after_forward


def _strategy(cfg: Config, topology: Topology) -> Native:
    if not sharded(cfg):
        return strategy("ddp")
    if cfg.sharding.hybrid:
        return strategy("fsdp", sharding_strategy="_HYBRID_SHARD_ZERO2" if _keeps(cfg) else "HYBRID_SHARD")
    gathered = cfg.sharding.within_group != "full_shard" or _keeps(cfg)
    return strategy("fsdp", sharding_strategy="SHARD_GRAD_OP" if gathered else "FULL_SHARD")


def _mesh(cfg: Config, topology: Topology) -> Native:
    if not cfg.sharding.hybrid or cfg.sharding.group_size is None:
        return {}
    groups, rest = divmod(topology.world_size, shard_group_size(cfg, topology))
    return {} if rest or not groups else strategy("fsdp", device_mesh=[groups, cfg.sharding.group_size])


def _unnamed(cfg: Config) -> bool:
    """Whether nothing says which modules are units."""
    return cfg.sharding.units == "auto" and not cfg.sharding.min_unit_params


def _least(cfg: Config, topology: Topology) -> Native:
    if not sharded(cfg) or cfg.sharding.units != "auto" or not cfg.sharding.min_unit_params:
        return {}
    policy = "torch.distributed.fsdp.wrap.size_based_auto_wrap_policy"
    return strategy(
        "fsdp", auto_wrap_policy={"class_path": policy, "init_args": {"min_num_params": cfg.sharding.min_unit_params}}
    )


def _offload(cfg: Config, topology: Topology) -> Native:
    return strategy("fsdp", cpu_offload=True) if "cpu" in (cfg.offload.params, cfg.offload.optimizer) else {}


def _recomputed(cfg: Config) -> list[str] | None:
    """Classes to recompute; None where they are not named."""
    asked = cfg.activation_checkpointing
    if isinstance(asked, list):
        return asked
    return cfg.sharding.units if isinstance(cfg.sharding.units, list) else None


def _recomputation(cfg: Config, topology: Topology) -> Native:
    names = None if cfg.activation_checkpointing == "none" or not sharded(cfg) else _recomputed(cfg)
    return strategy("fsdp", activation_checkpointing_policy=list(names)) if names else {}


def _buckets(cfg: Config, topology: Topology) -> Native:
    return {} if sharded(cfg) else strategy("ddp", bucket_cap_mb=cfg.communication.reduce_bucket_size * 4 / 2**20)


_NEAREST = "nearest is SHARD_GRAD_OP; FSDP gathers in every forward"
_UNSHARDED = unless("no_shard", lambda cfg: not sharded(cfg), "nothing is gathered")
_TIME = "affects only time and memory"
_CLIPPING = "Lightning 2.6.6 cannot clip by norm with FSDP: the snippet overrides the hook"

_OWN: Mapping[str, Rule] = {
    "backend": row(
        Fit.EQUIVALENT,
        "FSDPStrategy",
        "Lightning's FSDPStrategy is FSDP1, with the same math",
        unless("no_shard", lambda cfg: not sharded(cfg)),
    ),
    "sharding.strategy": exact(
        "sharding_strategy",
        unless("no_shard", lambda cfg: not sharded(cfg), "DDPStrategy"),
        approximate(
            *is_("sharding.strategy", "shard_optimizer"),
            f"{_NEAREST}; it reduces gradients on every micro-batch; or write backend: deepspeed",
        ),
        approximate(
            "shard_grad_op or hybrid_shard_grad_op",
            lambda cfg: cfg.sharding.within_group == "shard_grad_op",
            f"{_NEAREST}; or write backend: deepspeed",
        ),
        to=_strategy,
    ),
    "sharding.group_size": row(
        Fit.EXACT,
        "device_mesh",
        "Lightning makes a device mesh only on CUDA (strategies/fsdp.py, setup_environment)",
        unless("not hybrid", lambda cfg: not cfg.sharding.hybrid, "there are no groups"),
        when_default(
            "sharding.group_size", "the ranks of a node, which FSDP1 takes without a mesh where auto_wrap_policy is set"
        ),
        to=_mesh,
    ),
    "sharding.reshard_after_forward": exact("sharding_strategy", RESHARDS_TO_ALL),
    "sharding.units": exact(
        "auto_wrap_policy",
        _UNSHARDED,
        needs_input(
            "auto with a hybrid strategy",
            lambda cfg: _unnamed(cfg) and cfg.sharding.hybrid and cfg.sharding.group_size is None,
            "name your model's block class in auto_wrap_policy (--set sharding.units=[Block]): Lightning refuses "
            "HYBRID_SHARD without one",
        ),
        needs_input("auto", _unnamed, "name your model's block class in auto_wrap_policy, or all is gathered at once"),
        to=lambda cfg, topology: (
            strategy("fsdp", auto_wrap_policy=list(cfg.sharding.units))
            if sharded(cfg) and cfg.sharding.units != "auto"
            else {}
        ),
    ),
    "sharding.min_unit_params": row(
        Fit.EQUIVALENT,
        "auto_wrap_policy",
        "size_based_auto_wrap_policy cuts at any module of this size, not at blocks",
        _UNSHARDED,
        when_default("sharding.min_unit_params"),
        equivalent(
            "beside class names",
            lambda cfg: cfg.sharding.units != "auto",
            "Lightning has no smallest size beside class names; the same math with smaller units",
        ),
        to=_least,
    ),
    "sharding.conditional_modules": row(
        Fit.NEEDS_INPUT,
        SCRIPT,
        "leave these out of auto_wrap_policy; every rank must use their parameters in each step",
        when_default("sharding.conditional_modules"),
        needs_input("no_shard", lambda cfg: not sharded(cfg), "DDPStrategy needs find_unused_parameters=True for them"),
    ),
    **moved_together("cpu_offload", _offload),
    "activation_checkpointing": exact(
        "activation_checkpointing_policy",
        when_default("activation_checkpointing"),
        needs_input(
            "without sharding",
            lambda cfg: not sharded(cfg),
            "DDPStrategy has no argument for it; call torch's apply_activation_checkpointing",
        ),
        needs_input(
            "no classes named",
            lambda cfg: _recomputed(cfg) is None,
            "name the class of your model's blocks in activation_checkpointing_policy",
        ),
        equivalent(
            *is_("activation_checkpointing", "selective"),
            "full blocks are recomputed: the same results, less memory, more time",
        ),
        to=_recomputation,
    ),
    "training.gradient_clipping": TRAINING["training.gradient_clipping"]._replace(
        when=(UNCLIPPED, equivalent("FSDPStrategy", sharded, _CLIPPING))
    ),
    "training.buffers": BUFFERS._replace(
        key="broadcast_buffers of DDPStrategy",
        to=lambda cfg, topology: (
            strategy("ddp", broadcast_buffers=cfg.training.buffers == "rank0")
            if not sharded(cfg) and cfg.training.buffers in ("rank0", "local")
            else {}
        ),
        when=(
            *BUFFERS.when,
            equivalent("rank0 with no_shard", lambda cfg: not sharded(cfg), BEFORE_EACH_FORWARD),
        ),
    ),
    "communication.reduce_bucket_size": row(
        Fit.IGNORED,
        "bucket_cap_mb of DDPStrategy",
        "FSDP reduces unit by unit: affects only time and memory",
        unless("no_shard", lambda cfg: not sharded(cfg)),
        to=_buckets,
    ),
    "communication.prefetch_bucket_size": row(
        Fit.IGNORED,
        NO_KEY,
        f"FSDP1 gathers one unit ahead; {_TIME}",
        unless(
            "nothing is gathered ahead",
            lambda cfg: cfg.sharding.within_group != "full_shard",
            "there is nothing to decide",
        ),
    ),
    "compile.mode": row(
        Fit.NEEDS_INPUT,
        MODULE,
        "hand torch.compile(model) to trainer.fit, or compile the blocks in configure_model",
        when_default("compile.mode"),
    ),
    "compile.backend": row(
        Fit.NEEDS_INPUT, MODULE, "say it in the call of torch.compile", when_default("compile.mode")
    ),
    "native": row(
        Fit.NEEDS_INPUT,
        SCRIPT,
        "FSDPStrategy (FSDP1) lacks these settings of FSDP2; call them in your script",
        unless("nothing for fsdp", lambda cfg: not cfg.native.get("fsdp")),
    ),
}

FSDP: Mapping[str, Rule] = rows(PRECISION, TRAINING, RECIPE, SAVING, LAUNCHING, _OWN)
"""Rows for `backend: fsdp`."""
