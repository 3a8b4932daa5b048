"""Keys of FSDP's mixed precision: `MixedPrecision` of FSDP1 and `MixedPrecisionPolicy` of FSDP2 (torch 2.13).

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Unreadable
from unishard.contract.installed import version_of
from unishard.contract.key_rows import boolean, sets
from unishard.contract.rules import Fit
from unishard_fsdp.fields import DTYPES

_WORDS = {name: short for short, long in DTYPES.items() for name in (short, long)} | {
    "float": "fp32",
    "half": "fp16",
    "no": "fp32",
}


def dtype(value: Any) -> str:
    """Read a dtype, in the config's word.

    Raises:
        Unreadable: It is none that unishard computes in.
    """
    name = str(value).strip().lower().removeprefix("torch.")
    if name not in _WORDS:
        raise Unreadable(f"must be one of {', '.join(DTYPES.values())}, got {shown(value)}; write one of them", value)
    return _WORDS[name]


def _short(value: Any, document: DocumentValues) -> KeyEffect:
    """Read one word for all dtypes, as Accelerate accepts it."""
    if value is None or value == {}:
        return KeyEffect(Fit.IGNORED, "is not set")
    name = dtype(value)
    return KeyEffect(fields={"precision.compute": name, "precision.reduce": name})


_CHANGED = (2, 15)
"""From this torch on, FSDP2 without `reduce_dtype` reduces in the parameter's `grad_dtype`, by default its own dtype
(torch 2.15, _fsdp_api.py); before, it reduced in `param_dtype`, as FSDP1 still does."""


def _reduce(value: Any, document: DocumentValues) -> KeyEffect:
    param = document.get("mixed_precision.param_dtype")
    if value is not None or param is None:
        return KeyEffect(fields={"precision.reduce": "fp32" if value is None else dtype(value)})
    if str(document.get("version")) != "2" or dtype(param) == "fp32":
        return KeyEffect(fields={"precision.reduce": dtype(param)})
    installed = version_of("torch")
    match = re.match(r"(\d+)\.(\d+)", installed)
    is_old = match is not None and (int(match[1]), int(match[2])) < _CHANGED
    note = (
        "is not set: FSDP2 reduces in param_dtype up to torch 2.14, and from 2.15 on in the dtype of the parameters, "
        f"mostly fp32; read for {'the installed torch ' + installed if match else 'torch 2.15, as none is installed'}"
    )
    return KeyEffect(note=note, fields={"precision.reduce": dtype(param) if is_old else "fp32"}, notable=True)


def _buffers(value: Any, document: DocumentValues) -> KeyEffect:
    if value is None:
        return KeyEffect(fields={"precision.buffers": "keep"})
    return KeyEffect(fields={"precision.buffers": dtype(value)})


def _output(value: Any, document: DocumentValues) -> KeyEffect:
    param = document.get("mixed_precision.param_dtype")
    if value is None or (param is not None and dtype(value) == dtype(param)):
        return KeyEffect(Fit.IGNORED, "outputs already have the compute dtype")
    key, note = "fsdp.mp_policy.output_dtype", "another engine leaves outputs in the compute dtype"
    return KeyEffect(Fit.APPROXIMATE, note, native={key: DTYPES[dtype(value)]})


def _inputs(value: Any, document: DocumentValues) -> KeyEffect:
    if boolean(value):
        return KeyEffect(
            Fit.IGNORED, "floating-point inputs are cast; of units, FSDP casts all, and here the first argument is"
        )
    return KeyEffect(fields={"precision.cast_inputs": False})


PRECISION: Mapping[str, Key] = {
    "mixed_precision": Key(_short, ("precision.compute", "precision.reduce")),
    "mixed_precision.param_dtype": sets("precision.compute", lambda value: "fp32" if value is None else dtype(value)),
    "mixed_precision.reduce_dtype": Key(_reduce, ("precision.reduce",)),
    "mixed_precision.buffer_dtype": Key(_buffers, ("precision.buffers",)),
    "mixed_precision.output_dtype": Key(_output, ("native.fsdp.mp_policy.output_dtype",), Fit.APPROXIMATE),
    "mixed_precision.cast_forward_inputs": Key(_inputs, ("precision.cast_inputs",)),
}
"""The rows below `mixed_precision`."""
