"""Number formats: what DeepSpeed's keys say, and how it says the fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.describe import shown
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Undecided, Unreadable
from unishard.contract.fallbacks import FALLBACKS
from unishard.contract.field_rows import exact, left_to_script, row
from unishard.contract.key_rows import boolean, integer, number, rejected, sets
from unishard.contract.render import AUTO
from unishard.contract.rules import Fit, Rule, When, approximate, is_, unless, unsupported
from unishard_arguments.deepspeed.facts import (
    autocast_dtype,
    compute,
    dropped,
    may_compute,
    only,
    quiet,
    sharing,
    stage,
    undecided,
)
from unishard_deepspeed import fields
from unishard_deepspeed.keys.values import dtype

_ONLY_BUFFERS = "DeepSpeed keeps only buffers of these names in fp32; parameters of these names stay in it as well"
_ADDED_UP = (
    "DeepSpeed accumulates in the dtype of compute; fp32 is more exact; set precision.accumulate for DeepSpeed's"
)
_USUAL_HYSTERESIS = 2
_AUTOCAST = "DeepSpeed casts operations (torch.autocast); here parameters are cast"
_NO_DTYPE = (
    f"{_AUTOCAST}; without torch_autocast.dtype, CUDA computes in fp16, and DeepSpeed 0.19.8 does not scale the loss"
)


def assumed(document: DocumentValues) -> dict[str, Any]:
    """Formats and a scale that DeepSpeed takes where the config is silent."""
    defaults: dict[str, Any] = {}
    if compute(document) != "fp32":
        defaults |= {"communication_data_type": None, "data_types.grad_accum_dtype": None}
        if sharing(document) > 1:
            defaults |= {"seq_parallel_communication_data_type": "fp32"}
    if _dynamic(document):
        defaults |= {"fp16.loss_scale_window": 1000, "fp16.hysteresis": _USUAL_HYSTERESIS}
    return defaults


def _fp16(document: DocumentValues) -> bool:
    return may_compute(document, "fp16") and not quiet(boolean, document.get("torch_autocast.enabled"), False)


def _dynamic(document: DocumentValues) -> bool:
    return _fp16(document) and not quiet(number(0), document.get("fp16.loss_scale"), 0)


def _enabled(name: str) -> Key:
    def read(value: Any, document: DocumentValues) -> KeyEffect:
        if value != AUTO and boolean(value):
            return KeyEffect(fields={"precision.compute": name})
        dtype_name = compute(document)
        if isinstance(dtype_name, Undecided):
            return undecided(dtype_name.who, "precision.compute")
        if value == AUTO:
            return dropped(f"precision.compute is {dtype_name}, so this comes out as false")
        return KeyEffect(fields={"precision.compute": dtype_name})

    return Key(read, ("precision.compute",))


def _autocast(value: Any, document: DocumentValues) -> KeyEffect:
    if not boolean(value):
        return dropped("is off")
    note = _NO_DTYPE if document.get("torch_autocast.dtype") is None else _AUTOCAST
    return KeyEffect(Fit.APPROXIMATE, note, {"precision.compute": autocast_dtype(document)})


def _reduce(value: Any, document: DocumentValues) -> KeyEffect:
    if sharing(document) > 1:
        return dropped("seq_parallel_communication_data_type decides instead, fp32 where it is absent")
    if value is not None:
        return KeyEffect(fields={"precision.reduce": dtype(value)})
    dtype_name = compute(document)
    if isinstance(dtype_name, Undecided):
        return undecided("precision.compute, the default of DeepSpeed", "precision.reduce")
    return KeyEffect(
        note="by default DeepSpeed reduces in the dtype of compute", fields={"precision.reduce": dtype_name}
    )


def _reduce_wide(value: Any, document: DocumentValues) -> KeyEffect:
    if not boolean(value):
        return KeyEffect(Fit.IGNORED, "is off")
    note = "a name of older versions, ignored by 0.19.8: communication_data_type: fp32"
    return KeyEffect(note=note, fields={"precision.reduce": "fp32"}, rejected_upstream=True)


def _accumulate(value: Any, document: DocumentValues) -> KeyEffect:
    """Where the key is absent, DeepSpeed adds up in the format of compute: the one default that is not taken over."""
    if value is not None:
        return KeyEffect(fields={"precision.accumulate": dtype(value)})
    if _pure(document):
        return KeyEffect(fields={"precision.accumulate": compute(document)})
    if quiet(integer(1), document.get("gradient_accumulation_steps")) == 1:
        return KeyEffect(
            note="nothing is added up in a window of one micro-batch", fields={"precision.accumulate": "fp32"}
        )
    return KeyEffect(Fit.EQUIVALENT, _ADDED_UP, {"precision.accumulate": "fp32"})


def _pure(document: DocumentValues) -> bool:
    dtype_name = compute(document)
    return quiet(boolean, document.get(f"{dtype_name}.{dtype_name}_master_weights_and_grads"), False) is True


def _masters(name: str) -> Key:
    def read(value: Any, document: DocumentValues) -> KeyEffect:
        if not boolean(value):
            return dropped("is off: the masters are fp32")
        if not may_compute(document, name):
            return dropped(f"{name} is off")
        states = name == "bf16" and not quiet(boolean, document.get("bf16.bf16_optimizer_states"), False)
        note = "DeepSpeed keeps an fp32 state; elsewhere it has the dtype of the master weights" if states else ""
        return KeyEffect(Fit.APPROXIMATE if states else Fit.EXACT, note, {"precision.master": name})

    return Key(read, ("precision.master",))


def _states(value: Any, document: DocumentValues) -> KeyEffect:
    if boolean(value) and not quiet(boolean, document.get("bf16.bf16_master_weights_and_grads"), False):
        raise Unreadable("must be false without bf16_master_weights_and_grads; write both")
    return dropped("the state has the format of the masters") if boolean(value) else dropped("is off")


def _param_dtype(value: Any, document: DocumentValues) -> KeyEffect:
    return dropped("is null") if value is None else KeyEffect(fields={"precision.compute": dtype(value)})


def _loss_scale(value: Any, document: DocumentValues) -> KeyEffect:
    return KeyEffect(fields={"precision.loss_scale": number(0)(value) or "dynamic"})


def _hysteresis(value: Any, document: DocumentValues) -> KeyEffect:
    if integer(1)(value) == 1:
        return KeyEffect(note="each overflow halves the scale, as elsewhere")
    note = f"DeepSpeed halves the loss scale after {integer(1)(value)} overflows, others after each"
    if compute(document) != "fp16":
        return dropped(f"if precision.compute is fp16, {note}")
    # 2 is the default, which the examples of DeepSpeed also spell out: it is not a choice.
    usual = integer(1)(value) == _USUAL_HYSTERESIS
    return KeyEffect(
        Fit.EQUIVALENT if usual else Fit.APPROXIMATE,
        f"{note}: the same updates, fewer of them skipped" if usual else note,
    )


def _least(value: Any, document: DocumentValues) -> KeyEffect:
    if value in (None, AUTO) or quiet(integer(1), value) is not None or not _dynamic(document):
        return dropped(_LEAST)
    number(0)(value)
    return KeyEffect(
        Fit.IGNORED,
        f"{_LEAST}; DeepSpeed 0.19.8 takes only whole numbers from 1, so it is left out",
        rejected_upstream=True,
    )


def _overflow(value: Any, document: DocumentValues) -> KeyEffect:
    dtype_name, at = compute(document), stage(document)
    read = (dtype_name, at) in (("bf16", 1), ("bf16", 2), ("fp32", 0))  # the last checks nothing either way
    if not boolean(value) and isinstance(dtype_name, Undecided) and may_compute(document, "bf16") and at in (1, 2):
        return undecided("precision.compute: ignore in bf16, otherwise skip", "training.nonfinite")
    if boolean(value) or not read:
        return dropped("is on, or unused: only used at stages 1 and 2 in bf16")
    return KeyEffect(fields={"training.nonfinite": "ignore"})


_OFF = "fp16 is off"
_STATIC = "fp16 is off, or its loss scale stays"
_LEAST = "the scale at which DeepSpeed ends a run that keeps overflowing"
_OF_AMP = "belongs to amp, and DeepSpeed 0.19.8 refuses it here; remove it"
_IN_BF16 = "bf16 has no loss scale, and DeepSpeed 0.19.8 refuses the key; remove it"


def _scaling(read: Any, holds: Any, *fields: str) -> Key:
    return only(Key(read, fields), holds, _OFF if holds is _fp16 else _STATIC)


def _kept(value: Any, document: DocumentValues) -> KeyEffect:
    if value == "auto":
        return KeyEffect(fields={"precision.keep_fp32": "auto"})
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise Unreadable(
            f"must be auto or a list of names, got {shown(value)}; write parts of names of the model's buffers", value
        )
    if not value:
        return KeyEffect(fields={"precision.keep_fp32": []})
    return KeyEffect(
        Fit.APPROXIMATE, _ONLY_BUFFERS, {"precision.keep_fp32": [name.replace("*", ".*") for name in value]}
    )


def _kept_of(cfg: Config, topology: Topology) -> Native:
    names = cfg.precision.keep_fp32
    return (
        {} if names == "auto" else {"data_types": {"keep_in_fp32_modules": [name.replace(".*", "*") for name in names]}}
    )


def _block(name: str) -> dict[str, Key]:
    return {
        f"{name}.enabled": _enabled("bf16"),
        f"{name}.check_grad_overflow": Key(_overflow, ("training.nonfinite",)),
        f"{name}.bf16_master_weights_and_grads": _masters("bf16"),
        f"{name}.bf16_optimizer_states": Key(_states, ("precision.master",)),
        **{
            f"{name}.{key}": rejected(_IN_BF16)
            for key in (
                "auto_cast",
                "loss_scale",
                "initial_scale_power",
                "loss_scale_window",
                "hysteresis",
                "min_loss_scale",
            )
        },
        f"{name}.opt_level": rejected(_OF_AMP),
    }


KEYS: Mapping[str, Key] = {
    **_block("bf16"),
    **_block("bfloat16"),
    "fp16.enabled": _enabled("fp16"),
    "fp16.loss_scale": _scaling(_loss_scale, _fp16, "precision.loss_scale"),
    "fp16.initial_scale_power": _scaling(
        lambda value, document: KeyEffect(fields={"precision.initial_loss_scale": 2.0 ** integer(0, 127)(value)}),
        _dynamic,
        "precision.initial_loss_scale",
    ),
    "fp16.loss_scale_window": _scaling(
        lambda value, document: KeyEffect(fields={"precision.loss_scale_growth_interval": integer(1)(value)}),
        _dynamic,
        "precision.loss_scale_growth_interval",
    ),
    "fp16.hysteresis": _scaling(_hysteresis, _dynamic),
    "fp16.opt_level": rejected(_OF_AMP),
    "fp16.min_loss_scale": Key(_least, (), Fit.IGNORED, _LEAST),
    "fp16.fp16_master_weights_and_grads": _masters("fp16"),
    "torch_autocast.enabled": Key(_autocast, ("precision.compute",), Fit.APPROXIMATE, _AUTOCAST),
    "communication_data_type": Key(_reduce, ("precision.reduce",)),
    "fp32_allreduce": Key(_reduce_wide, ("precision.reduce",), note="a name of versions before 0.5.8"),
    "data_types.param_dtype": Key(_param_dtype, ("precision.compute",)),
    "data_types.grad_accum_dtype": Key(_accumulate, ("precision.accumulate",)),
    "data_types.buffer_dtype": sets("precision.buffers", lambda value: "keep" if value is None else dtype(value)),
    "data_types.keep_in_fp32_modules": Key(_kept, ("precision.keep_fp32",), Fit.APPROXIMATE, _ONLY_BUFFERS),
}


def _compute_of(cfg: Config, topology: Topology) -> Native:
    return {name: {"enabled": cfg.precision.compute == name} for name in ("bf16", "fp16")}


def _master_of(cfg: Config, topology: Topology) -> Native:
    pure = cfg.precision.pure and cfg.precision.master
    if pure == "bf16":
        return {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    return {"fp16": {"fp16_master_weights_and_grads": True}} if pure else {}


def _accumulate_of(cfg: Config, topology: Topology) -> Native:
    return {
        "data_types": {
            "grad_accum_dtype": cfg.precision.compute
            if fields.stage_of_strategy(cfg) == 0
            else cfg.precision.accumulate
        }
    }


def _scale_of(**settings: Any) -> Native:
    return {"fp16": settings}


def _scaled(cfg: Config) -> bool:
    return cfg.precision.compute == "fp16"


def _moving(cfg: Config) -> bool:
    return _scaled(cfg) and cfg.precision.loss_scale == "dynamic"


RULES: Mapping[str, Rule] = {
    "precision.compute": Rule(
        Fit.EQUIVALENT,
        "bf16.enabled, fp16.enabled",
        "rounds the model before it makes master weights; cast inputs in your script",
        _compute_of,
        (When("fp32", lambda cfg: cfg.precision.compute == "fp32", Fit.EXACT, ""),),
        auto=True,
    ),
    "precision.master": exact(
        "bf16.bf16_master_weights_and_grads, bf16.bf16_optimizer_states, fp16.fp16_master_weights_and_grads",
        unsupported(
            "that of compute with no_shard",
            lambda cfg: cfg.precision.pure and fields.stage_of_strategy(cfg) == 0,
            "stage 0 keeps fp32 master weights; write fp32, or choose shard_optimizer",
        ),
        approximate(
            *is_("precision.master", "fp16"),
            "DeepSpeed has fp16 master weights only under DeepSpeedCPUAdam, with an fp32 state",
        ),
        to=_master_of,
    ),
    "precision.reduce": exact(
        "communication_data_type", to=lambda cfg, topology: {"communication_data_type": cfg.precision.reduce}
    ),
    "precision.accumulate": exact(
        "data_types.grad_accum_dtype",
        approximate(
            "fp32 in bf16 or fp16 with no_shard",
            lambda cfg: fields.stage_of_strategy(cfg) == 0 and fields.wide(cfg),
            "stage 0 only accumulates in the dtype of compute, which is written",
        ),
        to=_accumulate_of,
    ),
    "precision.matmul": FALLBACKS["precision.matmul"],
    "precision.keep_fp32": row(
        Fit.APPROXIMATE,
        "data_types.keep_in_fp32_modules",
        _ONLY_BUFFERS,
        unless("auto or empty", lambda cfg: cfg.precision.keep_fp32 in ("auto", [])),
        to=_kept_of,
    ),
    "precision.cast_inputs": left_to_script(
        "cast only these inputs to the compute dtype", lambda cfg: cfg.precision.cast_inputs is True, "true"
    ),
    "precision.buffers": exact(
        "data_types.buffer_dtype",
        to=lambda cfg, topology: (
            {} if cfg.precision.buffers == "keep" else {"data_types": {"buffer_dtype": cfg.precision.buffers}}
        ),
    ),
    "precision.loss_scale": row(
        Fit.EXACT,
        "fp16.loss_scale",
        "0 for dynamic, with a hysteresis of 1, so that each overflow halves it",
        to=lambda cfg, topology: (
            ({} if not _scaled(cfg) else _scale_of(loss_scale=0, hysteresis=1))
            if cfg.precision.loss_scale == "dynamic"
            else _scale_of(loss_scale=cfg.precision.loss_scale)
        ),
    ),
    "precision.initial_loss_scale": exact(
        "fp16.initial_scale_power",
        approximate(
            "no power of two",
            lambda cfg: 2.0 ** _power(cfg) != cfg.precision.initial_loss_scale,
            "DeepSpeed begins at a power of two; the nearest is written",
        ),
        to=lambda cfg, topology: _scale_of(initial_scale_power=_power(cfg)) if _moving(cfg) else {},
    ),
    "precision.loss_scale_growth_interval": exact(
        "fp16.loss_scale_window",
        to=lambda cfg, topology: (
            _scale_of(loss_scale_window=cfg.precision.loss_scale_growth_interval) if _moving(cfg) else {}
        ),
    ),
}


def _power(cfg: Config) -> int:
    return max(0, round(math.log2(cfg.precision.initial_loss_scale)))
