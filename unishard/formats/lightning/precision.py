"""Lightning's words for dtypes, and what each comes to under each strategy (2.6.6, plugins/precision)."""

from __future__ import annotations

from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import DocumentValues, KeyEffect, Unreadable
from unishard.contract.rules import Fit

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
    name = _ALIASES.get(text, text)
    if name in _NEVER:
        raise Unreadable(f"must be a dtype that is supported, got {name}: {_NEVER[name]}", name)
    if name not in _FORMATS:
        raise Unreadable(f"must be one of {', '.join(_FORMATS)}, got {shown(value)}; write one of them", value)
    return name


def dtype_of(word: str) -> str:
    """The dtype that a word computes in."""
    return _FORMATS[word]


def precision(value: Any, document: DocumentValues) -> KeyEffect:
    """What `precision` says.

    Under `strategy` stands what runs; with `mixed` or `fp16` behind it for FSDP with own formats.
    """
    dtype_word, runs = word_of(value), document.get("strategy")
    true, dtype = dtype_word.endswith("true"), dtype_of(dtype_word)
    if str(runs).startswith("FSDPStrategy "):
        return _beside_own(dtype, true=true, unscaled=runs == "FSDPStrategy fp16" and dtype_word != "16-mixed")
    fields: dict[str, Any] = {"precision.compute": dtype, "precision.master": dtype if true else "fp32"}
    fields["precision.reduce"] = dtype if true or runs == "FSDPStrategy" else "fp32"
    if runs == "FSDPStrategy" and dtype != "fp32":
        fields["precision.buffers"] = dtype
    if dtype_word == "16-true":
        return KeyEffect(Fit.EXACT, _UNSCALED, fields | {"precision.loss_scale": 1.0})
    if true:
        return KeyEffect(fields=fields)
    return KeyEffect(Fit.EQUIVALENT, _AUTOCAST, fields, beyond_fields=True)


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
    return KeyEffect(Fit.EQUIVALENT, _AUTOCAST, fields, beyond_fields=True)
