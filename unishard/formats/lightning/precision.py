"""Lightning's words for dtypes, and what each comes to under each strategy (2.6.6, plugins/precision)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.describe import shown
from unishard.config.nested import Native, merge
from unishard.config.topology import Topology
from unishard.contract.entries import DocumentValues, KeyEffect, Unreadable
from unishard.contract.field_rows import exact, when_default
from unishard.contract.rules import Fit, Rule, approximate, equivalent, mixed, needs_input, sharded, unless
from unishard.formats.lightning.trainer_rules import is_scaled, trainer

DEFAULT = "32-true"
_ALIASES = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
_FORMATS = {"32-true": "fp32", "bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16", "16-true": "fp16"}
_NEVER = {
    "64-true": "nothing trains in double precision here; write 32-true",
    "transformer-engine": "FP8 is not supported; write bf16-mixed",
    "transformer-engine-float16": "FP8 is not supported; write 16-mixed",
}
_AUTOCAST = "autocast keeps norms, softmax and losses in fp32; without it all runs in this dtype"
_UNSCALED = "without fp32 master weights and loss scale, as in Lightning: small gradients are lost"


def word_of(value: Any) -> str:
    """Lightning's word, also from its older words and numbers.

    Raises:
        Unreadable: It is none that unishard computes in.
    """
    text = DEFAULT if value is None else str(value).strip().lower()
    word = _ALIASES.get(text, text)
    if word in _NEVER:
        raise Unreadable(f"must be a dtype that is supported, got {word}: {_NEVER[word]}")
    if word not in _FORMATS:
        raise Unreadable(f"must be one of {', '.join(_FORMATS)}, got {shown(value)}; write one of them")
    return word


def precision(value: Any, given: DocumentValues) -> KeyEffect:
    """What `precision` says.

    Under `strategy` stands what runs; with `mixed` or `fp16` behind it for FSDP with own formats.
    """
    word, runs = word_of(value), given.get("strategy")
    true, dtype = word.endswith("true"), _FORMATS[word]
    if str(runs).startswith("FSDPStrategy "):
        return _beside_own(dtype, true=true, unscaled=runs == "FSDPStrategy fp16" and word != "16-mixed")
    fields: dict[str, Any] = {"precision.compute": dtype, "precision.master": dtype if true else "fp32"}
    fields["precision.reduce"] = dtype if true or runs == "FSDPStrategy" else "fp32"
    if runs == "FSDPStrategy" and dtype != "fp32":
        fields["precision.buffers"] = dtype
    if word == "16-true":
        return KeyEffect(Fit.EXACT, _UNSCALED, fields | {"precision.loss_scale": 1.0})
    if true:
        return KeyEffect(fields=fields)
    return KeyEffect(Fit.EQUIVALENT, _AUTOCAST, fields)


def _beside_own(dtype: str, *, true: bool, unscaled: bool) -> KeyEffect:
    """With `FSDPStrategy(mixed_precision=...)` the word decides only the dtype of the master weights, autocast and the
    loss scale.
    """
    fields: dict[str, Any] = {
        "precision.master": dtype if true else "fp32",
        **({"precision.loss_scale": 1.0} if unscaled else {}),
    }
    if true or dtype == "fp32":
        return KeyEffect(fields=fields)
    return KeyEffect(Fit.EQUIVALENT, _AUTOCAST, fields)


def precision_section(word: str, scaling: Mapping[str, Any]) -> Native:
    """What Lightning adds to a DeepSpeed config that has no such block (fabric/strategies/deepspeed.py,
    `_format_precision_config`).
    """
    dtype = _FORMATS[word]
    if dtype == "fp16":
        return {"fp16": {"enabled": True, **scaling}}
    return {"bf16": {"enabled": True}} if dtype == "bf16" else {}


_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
_FSDP = "lightning.pytorch.strategies.FSDPStrategy"
_SCALERS = {
    True: (
        "lightning.pytorch.plugins.FSDPPrecision",
        {},
        "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
    ),
    False: ("lightning.pytorch.plugins.MixedPrecision", {"device": "cuda"}, "torch.amp.GradScaler"),
}
"""By whether the parameters are sharded: the precision plugin, what it needs, and the class of its scaler."""


def _word(cfg: Config) -> str:
    compute = cfg.precision.compute
    if cfg.precision.pure:
        return {"bf16": "bf16-true", "fp16": "16-true"}[compute]
    if compute == "fp16":
        return "16-mixed"
    return "bf16-mixed" if compute == "bf16" and not sharded(cfg) else "32-true"


def _scaling(cfg: Config) -> dict[str, Any]:
    """Arguments of the scaler that are not its defaults."""
    if not is_scaled(cfg):
        return {}
    precision = cfg.precision
    start = precision.initial_loss_scale if precision.loss_scale == "dynamic" else precision.loss_scale
    growth = precision.loss_scale_growth_interval if precision.loss_scale == "dynamic" else 2**31 - 1
    return {
        **({"init_scale": start} if start != 65536.0 else {}),
        **({"growth_interval": growth} if growth != 2000 else {}),
    }


def _precision(cfg: Config, topology: Topology) -> Native:
    """The word, or the plugin that has it: Lightning takes one of the two."""
    scaling = _scaling(cfg)
    if not scaling:
        return trainer(precision=_word(cfg))
    plugin, needed, scaler = _SCALERS[sharded(cfg)]
    arguments = {"precision": _word(cfg), **needed, "scaler": {"class_path": scaler, "init_args": scaling}}
    return trainer(plugins=[{"class_path": plugin, "init_args": arguments}])


def _format(argument: str, word: str) -> Native:
    formats = {"class_path": "torch.distributed.fsdp.MixedPrecision", "init_args": {argument: _DTYPES[word]}}
    return trainer(strategy={"class_path": _FSDP, "init_args": {"mixed_precision": formats}})


def _compute(cfg: Config, topology: Topology) -> Native:
    own = _format("param_dtype", cfg.precision.compute) if sharded(cfg) and mixed(cfg) else {}
    return merge(_precision(cfg, topology), own)


def _buffers(cfg: Config, topology: Topology) -> Native:
    return _format("buffer_dtype", cfg.precision.buffers) if sharded(cfg) and cfg.precision.buffers != "keep" else {}


_ALSO_AUTOCAST = "{word} also uses torch.autocast: norms, softmax and losses in fp32"
_NOT_SCALED = unless("nothing is scaled", lambda cfg: cfg.precision.compute != "fp16")
_NEVER_SCALED = approximate(
    "16-true",
    lambda cfg: cfg.precision.pure and cfg.precision.loss_scale != 1.0,
    "Lightning scales no loss in 16-true; write precision.master: fp32, or bf16",
)
_ONE = unless("16-true, a loss scale of 1", lambda cfg: cfg.precision.pure)
_SCALER = "Lightning 2.6.6 refuses a scaler in FSDPPrecision; the snippet sets it afterwards"
_OWN_SCALER = unless("the default", lambda cfg: not _scaling(cfg), "is the scaler's default")
_SET_LATER = equivalent("FSDP", sharded, _SCALER)

PRECISION: Mapping[str, Rule] = {
    "precision.compute": exact(
        "mixed_precision.param_dtype",
        equivalent("fp16 with fp32 master weights", is_scaled, _ALSO_AUTOCAST.format(word="16-mixed")),
        equivalent(
            "bf16 without sharding",
            lambda cfg: not sharded(cfg) and mixed(cfg) and not cfg.precision.pure,
            _ALSO_AUTOCAST.format(word="bf16-mixed"),
        ),
        to=_compute,
    ),
    "precision.master": exact("precision"),
    "precision.reduce": exact(
        "mixed_precision.reduce_dtype",
        approximate(
            "without sharding, not the dtype of the gradients",
            lambda cfg: not sharded(cfg) and cfg.precision.reduce != cfg.precision.master,
            "DDP reduces gradients in their dtype, that of the master weights",
        ),
        to=lambda cfg, topology: _format("reduce_dtype", cfg.precision.reduce) if sharded(cfg) and mixed(cfg) else {},
    ),
    "precision.buffers": exact(
        "mixed_precision.buffer_dtype",
        when_default("precision.buffers"),
        needs_input(
            "without sharding", lambda cfg: not sharded(cfg), "cast the model's floating-point buffers yourself"
        ),
        to=_buffers,
    ),
    "precision.loss_scale": exact(
        "precision",
        _NOT_SCALED,
        _NEVER_SCALED,
        _ONE,
        approximate(
            "a number",
            lambda cfg: cfg.precision.loss_scale != "dynamic",
            "torch's scaler starts here and halves at an overflow; in the snippet it never grows",
        ),
    ),
    "precision.initial_loss_scale": exact("plugins", _NOT_SCALED, _NEVER_SCALED, _ONE, _OWN_SCALER, _SET_LATER),
    "precision.loss_scale_growth_interval": exact("plugins", _NOT_SCALED, _NEVER_SCALED, _ONE, _OWN_SCALER, _SET_LATER),
}
"""Rows of `precision`."""
