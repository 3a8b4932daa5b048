"""How a file of Accelerate says each field with DeepSpeed, in the keys that it has itself: one row for each leaf of the
schema.

It has few. What only DeepSpeed's own file can say gets a fit that says so; write that file with `--to deepspeed`, and
name it in `deepspeed_config_file` instead. Sources: accelerate 1.15.0, utils/dataclasses.py and accelerator.py;
deepspeed 0.19.8, runtime/config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native, flat
from unishard.config.sharding import ZERO_STAGES
from unishard.config.topology import Topology
from unishard.contract.fallbacks import rows
from unishard.contract.field_rows import asked, copied, exact, left_to_script, no_key, row, when_default
from unishard.contract.rules import (
    HYBRID,
    NO_KEY,
    SCRIPT,
    Fit,
    Rule,
    approximate,
    equivalent,
    is_,
    unless,
    unsupported,
)
from unishard.formats.accelerate import sequence
from unishard.formats.accelerate.deepspeed import NAMES, NEVER
from unishard.formats.accelerate.fsdp import CLASSES
from unishard.formats.accelerate.rules import mixed
from unishard.formats.accelerate.script import BY_SCRIPT

_FILE = "needs a deepspeed_config_file; write it with --to deepspeed"


SAVE_KEY = "zero3_save_16bit_model"
"""Accelerate's only key for a setting of DeepSpeed's own."""

SAVE = f"deepspeed.{NAMES[SAVE_KEY]}"
"""That setting."""


def _native_settings(cfg: Config) -> dict[str, Any]:
    """The settings that only DeepSpeed has, by dotted key."""
    return dict(flat(cfg.native.get("deepspeed", {})))


def _inline(**keys: Any) -> Native:
    return {"deepspeed_config": keys}


def _device(state: str, key: str) -> Rule:
    """Where parameters or the optimizer's state live."""
    return exact(
        f"deepspeed_config.{key}",
        unsupported(
            "nvme", lambda cfg: getattr(cfg.offload, state) == "nvme", f"Accelerate 1.15.0 drops the path; it {_FILE}"
        ),
        approximate(
            "the optimizer's, of sgd, lion or muon",
            lambda cfg: state == "optimizer" and cfg.optimizer.name in ("sgd", "lion", "muon"),
            "Accelerate 1.15.0 replaces every optimizer that it does not know by DeepSpeedCPUAdam",
        ),
        to=lambda cfg, topology: _inline(**{key: getattr(cfg.offload, state)}),
    )


def _clipping(cfg: Config, topology: Topology) -> Native:
    return _inline(
        gradient_clipping=NEVER if cfg.training.gradient_clipping is None else cfg.training.gradient_clipping
    )


def _bare(cfg: Config) -> bool:
    """Whether DeepSpeed makes updates that are not finite."""
    return cfg.sharding.strategy == "no_shard" and cfg.precision.compute == "fp32"


_SHARDING: Mapping[str, Rule] = {
    "backend": exact(
        "distributed_type",
        to=lambda cfg, topology: {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED"},
    ),
    "sharding.strategy": exact(
        "deepspeed_config.zero_stage",
        unsupported(*HYBRID, "Accelerate has no rank groups for DeepSpeed; use backend=fsdp or full_shard"),
        to=lambda cfg, topology: _inline(zero_stage=ZERO_STAGES.index(cfg.sharding.strategy)),
    ),
    "sharding.group_size": no_key(
        "Accelerate has no rank groups for DeepSpeed; use backend=fsdp or full_shard", fit=Fit.UNSUPPORTED
    ),
    "sharding.reshard_after_forward": no_key(
        "ZeRO-3 reshards by its own sizes: more traffic, less memory, the same math",
        lambda cfg: cfg.sharding.reshard_after_forward is True,
        "true",
        Fit.EQUIVALENT,
    ),
    "sharding.units": Rule(
        Fit.EQUIVALENT,
        f"fsdp_config.{CLASSES}",
        "ZeRO gathers parameter by parameter: the same math; Accelerate reads the classes where the type is FSDP again",
        lambda cfg, topology: (
            {"fsdp_config": {CLASSES: ",".join(cfg.sharding.units)}} if cfg.sharding.units != "auto" else {}
        ),
        (unless("auto", lambda cfg: cfg.sharding.units == "auto"),),
    ),
    **asked(Fit.IGNORED, NO_KEY, {"sharding.min_unit_params": "ZeRO has no units"}),
    "sharding.conditional_modules": exact(
        "deepspeed_config.deepspeed_moe_layer_cls_names",
        unless("not full_shard", lambda cfg: cfg.sharding.strategy != "full_shard", "nothing is gathered"),
        to=lambda cfg, topology: (
            _inline(deepspeed_moe_layer_cls_names=",".join(cfg.sharding.conditional_modules))
            if cfg.sharding.conditional_modules
            else {}
        ),
    ),
    "sharding.replicate": row(
        Fit.APPROXIMATE,
        NO_KEY,
        "no key: these are sharded too, with the same maths unless their weights are read outside their modules or "
        "ranks skip them",
        when_default("sharding.replicate"),
        unless("not full_shard", lambda cfg: cfg.sharding.strategy != "full_shard", "every rank holds them whole"),
    ),
}


def _shares(cfg: Config) -> bool:
    return cfg.parallel.sequence.on


def _groups(cfg: Config, topology: Topology) -> Native:
    """The mesh, where ranks share samples."""
    size, world = cfg.parallel.sequence.size, topology.world_size
    if size == 1 or world % size:
        return {}
    return sequence.block(dp_replicate_size=1, dp_shard_size=world // size, sp_size=size, sp_backend="deepspeed")


_SEQUENCE: Mapping[str, Rule] = {
    "parallel.sequence.size": row(
        Fit.APPROXIMATE,
        f"parallelism_config.{sequence.name_of('sp')}",
        "the script weighs each rank's loss by its tokens; Trainer does it",
        when_default("parallel.sequence.size"),
        to=_groups,
    ),
    "parallel.sequence.method": row(
        Fit.EQUIVALENT,
        f"parallelism_config.{sequence.name_of('sp')}",
        "DeepSpeed has only Ulysses, whose size must divide the heads: the same math, other traffic",
        unless(*is_("parallel.sequence.method", "ulysses")),
    ),
    **sequence.BY_SCRIPT,
}

_PRECISION: Mapping[str, Rule] = {
    "precision.compute": exact(
        "mixed_precision", to=lambda cfg, topology: {"mixed_precision": cfg.precision.compute if mixed(cfg) else "no"}
    ),
    "precision.master": no_key(
        f"training without fp32 master weights {_FILE}", lambda cfg: not cfg.precision.pure, "fp32", Fit.UNSUPPORTED
    ),
    "precision.reduce": row(
        Fit.APPROXIMATE,
        NO_KEY,
        "DeepSpeed reduces in the compute dtype, and with sequence parallelism in fp32; another one " + _FILE,
        unless("that", lambda cfg: cfg.precision.reduce == ("fp32" if _shares(cfg) else cfg.precision.compute)),
    ),
    "precision.accumulate": no_key(
        "DeepSpeed accumulates in the compute dtype; another one " + _FILE,
        lambda cfg: cfg.precision.accumulate == cfg.precision.compute or cfg.training.gradient_accumulation_steps == 1,
        "that of compute, or no accumulation",
        Fit.APPROXIMATE,
    ),
    **asked(
        Fit.APPROXIMATE,
        NO_KEY,
        {
            "precision.buffers": f"the dtype of buffers {_FILE}",
            "precision.loss_scale": f"DeepSpeed's default is a dynamic scale; another one {_FILE}",
            "precision.initial_loss_scale": f"DeepSpeed's default is 65536; another one {_FILE}",
        },
    ),
    "precision.loss_scale_growth_interval": no_key(
        f"DeepSpeed doubles the scale after 1000 updates; another one {_FILE}",
        lambda cfg: cfg.precision.loss_scale_growth_interval == 1000,
        "1000",
        Fit.APPROXIMATE,
    ),
}

_LOOP: Mapping[str, Rule] = {
    "offload.params": _device("params", "offload_param_device"),
    "offload.optimizer": _device("optimizer", "offload_optimizer_device"),
    **asked(Fit.IGNORED, NO_KEY, {"offload.pin_memory": f"affects only time and memory; it {_FILE}"}),
    "offload.nvme_path": no_key(f"Accelerate 1.15.0 drops the path; it {_FILE}", fit=Fit.UNSUPPORTED),
    **asked(
        Fit.NEEDS_INPUT,
        SCRIPT,
        {"activation_checkpointing": "model.gradient_checkpointing_enable(); Accelerate has no key for it"},
    ),
    "training.gradient_accumulation_steps": copied(
        "training.gradient_accumulation_steps", "deepspeed_config.gradient_accumulation_steps", auto=True
    ),
    "training.gradient_clipping": exact(
        "deepspeed_config.gradient_clipping",
        equivalent(
            "null",
            lambda cfg: cfg.training.gradient_clipping is None,
            "written as a norm that is never reached: Accelerate 1.15.0 turns null into 1.0",
        ),
        to=_clipping,
        auto=True,
    ),
    "training.nonfinite": no_key(
        "DeepSpeed skips such a step without an error; at stage 0 in fp32 it makes it",
        lambda cfg: cfg.training.nonfinite == ("ignore" if _bare(cfg) else "skip"),
        "what DeepSpeed does",
        Fit.APPROXIMATE,
    ),
    "communication.reduce_bucket_size": no_key(f"affects only time; it {_FILE}"),
    "communication.prefetch_bucket_size": no_key(f"affects only time; it {_FILE}"),
    "communication.overlap": no_key(f"affects only time: DeepSpeed overlaps at stage 3 without being told; it {_FILE}"),
    **asked(
        Fit.NEEDS_INPUT,
        SCRIPT,
        {"compile.mode": "export ACCELERATE_DYNAMO_BACKEND; Accelerate 1.15.0 drops dynamo_config here"},
    ),
    "compile.backend": left_to_script("ACCELERATE_DYNAMO_BACKEND before the launch"),
    "native": row(
        Fit.APPROXIMATE,
        f"deepspeed_config.{SAVE_KEY}",
        f"every other setting of DeepSpeed {_FILE}",
        unless("nothing for deepspeed", lambda cfg: not _native_settings(cfg)),
        unless("only of saving", lambda cfg: set(_native_settings(cfg)) == {NAMES[SAVE_KEY]}),
        to=lambda cfg, topology: (
            _inline(**{SAVE_KEY: saved}) if (saved := _native_settings(cfg).get(NAMES[SAVE_KEY])) is not None else {}
        ),
    ),
}

DEEPSPEED_RULES: Mapping[str, Rule] = rows(BY_SCRIPT, _SHARDING, _PRECISION, _SEQUENCE, _LOOP)
"""Rows in the order of the schema."""
