"""Explains errors of torch in a forward that come from its inputs: which module, what it got, and what to write
instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import TracebackType

import torch
from torch import Tensor, nn

from unishard.config import Precision
from unishard.distributed.dtypes import DTYPES
from unishard.errors import ModelError, UnishardError
from unishard.failures.rank_locations import place_of

# -- Find the modules in which a forward has failed ------------------------------------------------


def modules_in(traceback: TracebackType | None, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model that a traceback goes through, by name, the innermost first."""
    names = {module: name for name, module in model.named_modules()}
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    for frame in reversed(frames):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in names:
            yield names[owner], owner


_OUT_OF_RANGE = "index out of range in self"
"""torch 2.13 on the CPU, aten/src/ATen/native/Embedding.cpp."""

_WIDE = re.compile(r"\b(double|float64|long|int64)\b", re.IGNORECASE)
_COMPUTED = re.compile(r"\b(float|float32|bfloat16|half|float16)\b", re.IGNORECASE)
_MIXED = "mixed dtype"
"""How torch 2.13 writes the dtypes of operands that it does not take together: those of inputs, and those of
parameters."""


def explain_input(error: Exception, model: nn.Module) -> ModelError | None:
    """The error to raise in place of one that torch has raised in a forward; None if there is nothing to add to it.

    Args:
        error: What the forward has raised.
        model: The model, whose modules are looked for in the traceback.
    """
    text, place = str(error), next(modules_in(error.__traceback__, model), None)
    if place is None or isinstance(error, UnishardError):
        return None
    name, module = place
    where = f"the forward of {name or 'the model'} ({type(module).__name__}, {place_of(error)})"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and text == _OUT_OF_RANGE:
        return ModelError(f"{where} got {_ids(error, module)}")
    if (_WIDE.search(text) and _COMPUTED.search(text)) or (
        _MIXED in text and any(map(_is_wide, _given(error, module)))
    ):
        return ModelError(
            f"{where} computes with tensors of different dtypes ({text}); parameters are in the dtypes of `precision`, "
            "and numbers from numpy and Python in float64 or int64: cast such inputs to torch.float32 in the dataset, "
            "or before engine(...)"
        )
    return None


def _ids(error: Exception, module: nn.Embedding | nn.EmbeddingBag) -> str:
    """Which id a table does not have, and what to do."""
    rows = module.num_embeddings
    wrong = [
        int(ids[(ids < 0) | (ids >= rows)].flatten()[0]) for ids in _given(error, module) if _is_outside(ids, rows)
    ]
    got = f"{f'the id {wrong[0]}' if wrong else 'an id that it does not have'}, and has the ids from 0 to {rows - 1}; "
    if wrong and wrong[0] < 0:
        return (
            got + "a negative number such as -100 marks labels to ignore: pad ids with one that exists, such as "
            "tokenizer.pad_token_id"
        )
    return got + (
        "if they are tokens, the tokenizer is larger than the vocabulary: call "
        "model.resize_token_embeddings(len(tokenizer)) before "
        "unishard.prepare; if they are positions, the sequences are too long: truncate them"
    )


def _given(error: Exception, module: nn.Module) -> Iterator[Tensor]:
    """What the forward of a module was called with, and what it made of that."""
    traceback = error.__traceback__
    while traceback is not None:
        values = traceback.tb_frame.f_locals
        if values.get("self") is module:
            yield from (value for value in values.values() if isinstance(value, Tensor))
        traceback = traceback.tb_next


def _is_wide(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float64, torch.int64)


def _is_outside(ids: Tensor, rows: int) -> bool:
    return not ids.is_floating_point() and bool(((ids < 0) | (ids >= rows)).any())


# -- Explains errors of torch in a forward in 16 bits: which module, and what to write instead -----

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
