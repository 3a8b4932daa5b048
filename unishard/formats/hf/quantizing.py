"""How scripts around transformers say that the base is quantized: TRL, LLaMA-Factory, and `quantization_config`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.describe import shown
from unishard.config.nested import Native
from unishard.config.quantization import FOUR_BIT
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Unreadable, left_out
from unishard.contract.key_rows import boolean, one_of
from unishard.contract.render import FieldResult, RenderedDocument
from unishard.contract.rules import Fit
from unishard.formats.hf.loop import off

_TYPE, _DOUBLE, _SKIPPED = "quantization.type", "quantization.double_quantization", "quantization.skip_modules"
_BOTH = (_TYPE, _DOUBLE)
_FOUR, _EIGHT, _KIND, _STORED, _COMPUTED = (
    *("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_quant_storage"),
    "bnb_4bit_compute_dtype",
)
_NESTED = ("use_bnb_nested_quant", "bnb_4bit_use_double_quant")
_BITS, _METHOD, _WORD, _DOUBLED = "quantization_bit", "quantization_method", "quantization_type", "double_quantization"
_WORDS = {word: word for word in FOUR_BIT}
_DTYPES = {name: name for name in ("uint8", "float16", "bfloat16", "float32", "float64")}
_BYTES = "the same bytes, which lie in tensors of dtype uint8 on every engine"
_COMPUTES = "unishard multiplies in precision.compute"
_ONLY = "only weights that bitsandbytes quantizes are supported; write bnb"
_THRESHOLD = 6.0


def _on(value: Any) -> bool:
    return boolean(value if value is not None else False)


def _four_bits(value: Any, document: DocumentValues) -> KeyEffect:
    if not _on(value):
        return left_out("is off")
    if _on(document.get(_EIGHT)):
        raise Unreadable(f"must be false with {_EIGHT}: weights are stored in one way; write one of them")
    double = any(_on(document.get(name)) for name in _NESTED)
    word = one_of(_WORDS)(document.get(_KIND) or "nf4")
    return KeyEffect(fields={_TYPE: word, _DOUBLE: double}, copy_verbatim=True)


def _eight_bits(value: Any, document: DocumentValues) -> KeyEffect:
    return KeyEffect(fields={_TYPE: "int8"}, copy_verbatim=True) if _on(value) else left_out("is off")


def _with_four_bits(key: Key) -> Key:
    """A key that says something only beside `load_in_4bit`."""

    def read(value: Any, document: DocumentValues) -> KeyEffect:
        if value is None or not _on(document.get(_FOUR)):
            return left_out(f"only used with {_FOUR}")
        return key.read(value, document)

    return key._replace(read=read)


def _stored(value: Any, document: DocumentValues) -> KeyEffect:
    one_of(_DTYPES)(str(value).removeprefix("torch."))
    return KeyEffect(Fit.EQUIVALENT, _BYTES, copy_verbatim=True)


def _computed(value: Any, document: DocumentValues) -> KeyEffect:
    dtype = one_of(_DTYPES)(str(value).removeprefix("torch."))
    half = next((name for word, name in (("bf16", "bfloat16"), ("fp16", "float16")) if _on(document.get(word))), None)
    fit = Fit.EXACT if dtype == (half or "float32") else Fit.APPROXIMATE
    return KeyEffect(fit, "" if fit is Fit.EXACT else _COMPUTES, copy_verbatim=True)


def _bits(value: Any, document: DocumentValues) -> KeyEffect:
    """LLaMA-Factory's key, which assumes nf4 with double quantization."""
    if off(value):
        return left_out("is off")
    if str(value) not in ("4", "8"):
        return KeyEffect(Fit.UNSUPPORTED, "bitsandbytes stores weights in 4 or 8 bits; write 4 or 8")
    if str(value) == "8":
        return KeyEffect(fields={_TYPE: "int8"}, copy_verbatim=True)
    double = document.get(_DOUBLED)
    word = one_of(_WORDS)(document.get(_WORD) or "nf4")
    fields = {_TYPE: word, _DOUBLE: double is None or boolean(double)}
    return KeyEffect(fields=fields, copy_verbatim=True)


def _method(value: Any, document: DocumentValues) -> KeyEffect:
    if off(document.get(_BITS)):
        return left_out(f"only used with {_BITS}")
    if str(value).lower() not in ("bnb", "bitsandbytes"):
        return KeyEffect(Fit.UNSUPPORTED, _ONLY)
    return KeyEffect(copy_verbatim=True)


def _of_bits(value: Any, document: DocumentValues) -> KeyEffect:
    if str(document.get(_BITS)) != "4":
        return left_out(f"only used with {_BITS} 4")
    return KeyEffect(copy_verbatim=True)


def read_arguments(value: Any, document: DocumentValues) -> KeyEffect:
    """`quantization_config` of transformers, with the arguments of BitsAndBytesConfig."""
    if off(value):
        return left_out("is off")
    if not isinstance(value, Mapping):
        raise Unreadable(
            f"must be the arguments of BitsAndBytesConfig, got {shown(value)}; write {{{_FOUR}: true}}", value
        )
    if str(value.get("quant_method") or "bitsandbytes").lower() != "bitsandbytes":
        return KeyEffect(Fit.UNSUPPORTED, "only weights that bitsandbytes quantizes are supported; leave it out")
    four, eight = _on(value.get(_FOUR)), _on(value.get(_EIGHT))
    if four and eight:
        raise Unreadable(f"must not have both {_FOUR} and {_EIGHT}; write one of them")
    if not four and not eight:
        return left_out("is off")
    fields: dict[str, Any] = {_TYPE: one_of(_WORDS)(value.get(_KIND) or "fp4") if four else "int8"}
    if four:
        fields[_DOUBLE] = any(_on(value.get(name)) for name in _NESTED)
    skipped = value.get("llm_int8_skip_modules")
    if skipped:
        fields[_SKIPPED] = [re.escape(str(name)) for name in skipped]
    lost = [name for name in ("llm_int8_threshold",) if eight and value.get(name) not in (None, _THRESHOLD)]
    fit = Fit.APPROXIMATE if lost else Fit.EQUIVALENT
    note = f"{lost[0]} is {_THRESHOLD:g}" if lost else f"{_BYTES}; {_COMPUTES}"
    return KeyEffect(fit, note, fields, copy_verbatim=True)


KEYS: Mapping[str, Key] = {
    _FOUR: Key(_four_bits, _BOTH),
    _EIGHT: Key(_eight_bits, (_TYPE,)),
    _KIND: _with_four_bits(Key(lambda value, document: KeyEffect(copy_verbatim=True), (_TYPE,))),
    **{
        name: _with_four_bits(Key(lambda value, document: KeyEffect(copy_verbatim=True), (_DOUBLE,)))
        for name in _NESTED
    },
    _STORED: _with_four_bits(Key(_stored, (), Fit.EQUIVALENT, _BYTES)),
    _COMPUTED: _with_four_bits(Key(_computed, (), Fit.APPROXIMATE, _COMPUTES)),
    _BITS: Key(_bits, _BOTH),
    _METHOD: Key(_method),
    _WORD: Key(_of_bits, (_TYPE,)),
    _DOUBLED: Key(_of_bits, (_DOUBLE,)),
    "quantization_config": Key(read_arguments, (*_BOTH, _SKIPPED), Fit.EQUIVALENT, f"{_BYTES}; {_COMPUTES}"),
}
"""Keys of files around TrainingArguments."""


def with_trls_words(rendered: RenderedDocument, cfg: Config) -> RenderedDocument:
    """A document with TRL's arguments for a quantized base (TRL 1.16, trainer/model_config.py)."""
    four = {_FOUR: True, _KIND: cfg.quantization.type, _NESTED[0]: cfg.quantization.double_quantization}
    return _with(rendered, cfg, four, {_EIGHT: True}, _NESTED[0])


def with_llamafactorys_words(rendered: RenderedDocument, cfg: Config) -> RenderedDocument:
    """A document with LLaMA-Factory's arguments for a quantized base (0.9, hparams/model_args.py)."""
    four = {_BITS: 4, _WORD: cfg.quantization.type, _DOUBLED: cfg.quantization.double_quantization}
    return _with(rendered, cfg, {_METHOD: "bnb", **four}, {_METHOD: "bnb", _BITS: 8}, _DOUBLED)


def _with(rendered: RenderedDocument, cfg: Config, four: Native, eight: Native, double: str) -> RenderedDocument:
    if not cfg.quantization.on:
        return rendered
    written = four if cfg.quantization.type in FOUR_BIT else eight
    words = {_TYPE: FieldResult.held(*(name for name in written if name != double))}
    if double in written:
        words[_DOUBLE] = FieldResult.held(double)
    return RenderedDocument({**rendered.document, **written}, {**rendered.fields, **words})
