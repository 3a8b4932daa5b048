"""How a file of Accelerate says each field with DeepSpeed, in the keys that it has itself: one row for each leaf of the schema.

It has few. What only DeepSpeed's own file can say gets a fit that says so; write that file with `--to deepspeed`, and name it in
`deepspeed_config_file` instead. Sources: accelerate 1.15.0, utils/dataclasses.py and accelerator.py; deepspeed 0.19.8, runtime/config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native, flat
from unishard.config.topology import Topology
from unishard.formats.accelerate.deepspeed import NAMES, NEVER
from unishard.formats.accelerate.expressions import mixed
from unishard.formats.accelerate.script import BY_SCRIPT
from unishard.formats.fallbacks import copied, rows, when_default
from unishard.mapping.field_rows import none, write
from unishard.mapping.rules import Fit, Rule, When

__all__ = ["DEEPSPEED_EXPRESSIONS", "SAVE", "SAVE_KEY"]

_STAGES = {"no_shard": 0, "shard_optimizer": 1, "shard_grad_op": 2, "full_shard": 3}
_FILE = "needs DeepSpeed's own file; translate to deepspeed, and name that file in deepspeed_config_file"


SAVE_KEY = "zero3_save_16bit_model"
"""Accelerate's only key for a setting of DeepSpeed's own."""

SAVE = f"deepspeed.{NAMES[SAVE_KEY]}"
"""That setting."""


def _own(cfg: Config) -> dict[str, Any]:
    """The settings that only DeepSpeed has, by dotted key."""
    return dict(flat(cfg.native.get("deepspeed", {})))


def _inline(**keys: Any) -> Native:
    return {"deepspeed_config": keys}


def _device(what: str, key: str) -> Rule:
    """Where parameters or the optimizer's state live."""
    return Rule(
        Fit.EXACT,
        f"deepspeed_config.{key}",
        "",
        lambda cfg, topology: _inline(**{key: getattr(cfg.offload, what)}),
        (
            When("none", lambda cfg: getattr(cfg.offload, what) == "none", Fit.EXACT, ""),
            When(
                "nvme",
                lambda cfg: getattr(cfg.offload, what) == "nvme",
                Fit.UNSUPPORTED,
                f"Accelerate 1.15.0 never passes the path on (utils/launch.py); it {_FILE}",
            ),
            When(
                "the optimizer's, of sgd or lion",
                lambda cfg: what == "optimizer" and cfg.optimizer.name in ("sgd", "lion"),
                Fit.APPROXIMATE,
                "Accelerate 1.15.0 makes DeepSpeedCPUAdam of every optimizer that it does not know (utils/deepspeed.py)",
            ),
        ),
    )


def _clipping(cfg: Config, topology: Topology) -> Native:
    return _inline(gradient_clipping=NEVER if cfg.training.gradient_clipping is None else cfg.training.gradient_clipping)


def _mixed_scale(note: str, case: str, holds: Any) -> Rule:
    """A row of the loss scale, which DeepSpeed's default is or is not."""
    return none(note, holds, case, Fit.APPROXIMATE)


def _bare(cfg: Config) -> bool:
    """Whether DeepSpeed makes updates that are not finite."""
    return cfg.sharding.strategy == "no_shard" and cfg.precision.compute == "fp32"


_SHARDING: Mapping[str, Rule] = {
    "backend": Rule(
        Fit.EXACT,
        "distributed_type",
        "",
        lambda cfg, topology: {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED"},
    ),
    "sharding.strategy": Rule(
        Fit.EXACT,
        "deepspeed_config.zero_stage",
        "",
        lambda cfg, topology: _inline(zero_stage=_STAGES[cfg.sharding.strategy]),
        (
            When(
                "hybrid",
                lambda cfg: cfg.sharding.hybrid,
                Fit.UNSUPPORTED,
                f"Accelerate's keys know no groups of ranks for DeepSpeed; choose backend fsdp, or full_shard, or it {_FILE}",
            ),
        ),
    ),
    "sharding.group_size": none("there are no groups", lambda cfg: not cfg.sharding.hybrid, "not hybrid", Fit.UNSUPPORTED),
    "sharding.reshard_after_forward": none(
        "ZeRO-3 drops and gathers parameters by sizes of its own; more traffic, less memory, the same maths",
        lambda cfg: cfg.sharding.reshard_after_forward,
        "true",
        Fit.EQUIVALENT,
    ),
    "sharding.units": none(
        "ZeRO gathers parameter by parameter: the same maths", lambda cfg: cfg.sharding.units == "auto", "auto", Fit.EQUIVALENT
    ),
    "sharding.min_unit_params": none("ZeRO has no units", lambda cfg: not cfg.sharding.min_unit_params, "0"),
    "sharding.conditional_modules": Rule(
        Fit.EXACT,
        "deepspeed_config.deepspeed_moe_layer_cls_names",
        "",
        lambda cfg, topology: (
            _inline(deepspeed_moe_layer_cls_names=",".join(cfg.sharding.conditional_modules)) if cfg.sharding.conditional_modules else {}
        ),
        (
            when_default("sharding.conditional_modules"),
            When("not full_shard", lambda cfg: cfg.sharding.strategy != "full_shard", Fit.EXACT, "nothing is gathered"),
        ),
    ),
}

_PRECISION: Mapping[str, Rule] = {
    "precision.compute": Rule(
        Fit.EXACT, "mixed_precision", "", lambda cfg, topology: {"mixed_precision": cfg.precision.compute if mixed(cfg) else "no"}
    ),
    "precision.master": none(f"training without fp32 master weights {_FILE}", lambda cfg: not cfg.precision.pure, "fp32", Fit.UNSUPPORTED),
    "precision.reduce": none(
        "DeepSpeed reduces in the format that the model computes in; another one " + _FILE,
        lambda cfg: cfg.precision.reduce == cfg.precision.compute,
        "that of compute",
        Fit.APPROXIMATE,
    ),
    "precision.accumulate": none(
        "DeepSpeed adds gradients up in the format that the model computes in; another one " + _FILE,
        lambda cfg: cfg.precision.accumulate == cfg.precision.compute or cfg.training.gradient_accumulation_steps == 1,
        "that of compute, or no accumulation",
        Fit.APPROXIMATE,
    ),
    "precision.buffers": none(f"the format of buffers {_FILE}", lambda cfg: cfg.precision.buffers == "keep", "keep", Fit.APPROXIMATE),
    "precision.loss_scale": _mixed_scale(
        f"DeepSpeed has a dynamic scale, which halves only at the second overflow; another one {_FILE}",
        "not fp16",
        lambda cfg: cfg.precision.compute != "fp16",
    ),
    "precision.initial_loss_scale": _mixed_scale(
        f"DeepSpeed begins at 65536; another one {_FILE}",
        "65536, or not fp16",
        lambda cfg: cfg.precision.compute != "fp16" or cfg.precision.initial_loss_scale == 65536,
    ),
    "precision.loss_scale_growth_interval": _mixed_scale(
        f"DeepSpeed doubles the scale after 1000 updates; another one {_FILE}",
        "1000, or not fp16",
        lambda cfg: cfg.precision.compute != "fp16" or cfg.precision.loss_scale_growth_interval == 1000,
    ),
}

_LOOP: Mapping[str, Rule] = {
    "offload.params": _device("params", "offload_param_device"),
    "offload.optimizer": _device("optimizer", "offload_optimizer_device"),
    "offload.pin_memory": none(f"affects only time and memory; it {_FILE}", lambda cfg: cfg.offload.pin_memory, "true"),
    "offload.nvme_path": none(
        f"Accelerate 1.15.0 never passes the path on (utils/launch.py); it {_FILE}",
        lambda cfg: cfg.offload.nvme_path is None,
        "null",
        Fit.UNSUPPORTED,
    ),
    "activation_checkpointing": write(
        "model.gradient_checkpointing_enable(), or torch.utils.checkpoint; DeepSpeed recomputes nothing by itself",
        lambda cfg: cfg.activation_checkpointing == "none",
        "none",
    ),
    "training.gradient_accumulation_steps": copied(
        "training.gradient_accumulation_steps", "deepspeed_config.gradient_accumulation_steps", auto=True
    ),
    "training.gradient_clipping": Rule(
        Fit.EXACT,
        "deepspeed_config.gradient_clipping",
        "",
        _clipping,
        (
            When(
                "null",
                lambda cfg: cfg.training.gradient_clipping is None,
                Fit.EQUIVALENT,
                "Accelerate 1.15.0 makes 1.0 of no clipping, so a norm that is never reached stands for it",
            ),
        ),
        auto=True,
    ),
    "training.nonfinite": none(
        "DeepSpeed leaves such an update out without an error, and makes it at stage 0 in fp32",
        lambda cfg: cfg.training.nonfinite == ("ignore" if _bare(cfg) else "skip"),
        "what DeepSpeed does",
        Fit.APPROXIMATE,
    ),
    "communication.reduce_bucket_size": none(f"affects only time; it {_FILE}"),
    "communication.prefetch_bucket_size": none(f"affects only time; it {_FILE}"),
    "compile.mode": write(
        "nothing there, but export ACCELERATE_DYNAMO_BACKEND before the launch: Accelerate 1.15.0's DeepSpeed launcher does not pass "
        "dynamo_config on (utils/launch.py)",
        lambda cfg: cfg.compile.mode == "none",
        "none",
    ),
    "compile.backend": write("ACCELERATE_DYNAMO_BACKEND before the launch", lambda cfg: cfg.compile.mode == "none", "nothing is compiled"),
    "native": Rule(
        Fit.APPROXIMATE,
        f"deepspeed_config.{SAVE_KEY}",
        f"every other setting of DeepSpeed {_FILE}",
        lambda cfg, topology: _inline(**{SAVE_KEY: saved}) if (saved := _own(cfg).get(NAMES[SAVE_KEY])) is not None else {},
        (
            When("nothing for deepspeed", lambda cfg: not _own(cfg), Fit.EXACT, ""),
            When("only of saving", lambda cfg: set(_own(cfg)) == {NAMES[SAVE_KEY]}, Fit.EXACT, ""),
        ),
    ),
}

DEEPSPEED_EXPRESSIONS: Mapping[str, Rule] = rows(_SHARDING, _PRECISION, _LOOP, BY_SCRIPT)
"""Rows in the order of the schema."""
