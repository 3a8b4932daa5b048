"""Explains errors of torch in a forward in 16 bits: which module, and what to write instead.

Without it: torch names two dtypes and a line of the model, and nothing says that the config has made one of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from unishard.config import Precision
from unishard.contract.kit.tracebacks import modules_in
from unishard.distributed.dtypes import DTYPES
from unishard.errors import ModelError, UnishardError

_LOW, _FP32 = re.compile("BFloat16|Half"), re.compile(r"Float(?!\d)|\bfloat(32)?\b")
"""How torch 2.13 writes the dtypes of operands that it does not take together; each operator has a sentence of its
own."""

_STRIDES = "strides should be multiple of 16 bytes"
"""torch 2.13, aten/src/ATen/native/GroupedMMUtils.h."""


def explain_dtype(error: Exception, model: nn.Module, precision: Precision) -> ModelError | None:
    """The error to raise in place of one that torch has raised in a forward; None if there is nothing to add to it.

    Args:
        error: What the forward has raised.
        model: The model, whose modules are looked for in the traceback.
        precision: The dtypes.
    """
    text = str(error)
    if precision.compute == "fp32" or isinstance(error, UnishardError):
        return None
    path = list(modules_in(error.__traceback__, model))
    if path and _LOW.search(text) and _FP32.search(text):
        kept = next((found for found in (list(_fp32_buffers(*each)) for each in path) if found), [])
        return ModelError(_mixes(path[0], kept, precision.compute, text))
    if text == _STRIDES and path:
        return ModelError(
            f"{_where(path[0])} multiplies experts in groups, which torch does in {precision.compute} only if their "
            "sizes are multiples "
            f"of 8 ({text}); change the sizes, or call model.set_experts_implementation('eager') before prepare"
        )
    return None


def _fp32_buffers(name: str, module: nn.Module) -> Iterator[str]:
    return (f"{name}.{each}".lstrip(".") for each, buffer in module.named_buffers() if buffer.dtype == DTYPES["fp32"])


def _mixes(place: tuple[str, nn.Module], kept: list[str], compute: str, text: str) -> str:
    mixed = f"{_where(place)} computes with tensors in fp32 and {compute} ({text}); "
    if not kept:
        return mixed + (
            "it got or made a tensor in another dtype than precision.compute, as with the dtype of a weight that is "
            "not gathered: cast it in the model's code, name the arguments of the model and its units that are to be "
            "cast in precision.cast_inputs, or keep the module in precision.keep_fp32"
        )
    buffers = ", ".join(kept[:3]) + (f" and {len(kept) - 3} more" if len(kept) > 3 else "")
    return mixed + (
        f"precision.compute is {compute}, but precision.buffers: keep leaves buffers in fp32: {buffers}; set "
        "precision.buffers to "
        f"{compute}, keep the module in precision.keep_fp32, or cast them where the module uses them"
    )


def _where(place: tuple[str, nn.Module]) -> str:
    return f"the forward of {place[0] or 'the model'}"
