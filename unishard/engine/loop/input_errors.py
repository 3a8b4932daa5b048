"""Explains errors of torch in a forward that come from its inputs: which module, what it got, and what to write
instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from unishard.engine.loop.failed_modules import modules_in
from unishard.errors import ModelError, UnishardError
from unishard.failures.rank_locations import place_of

_OUT_OF_RANGE = "index out of range in self"
"""torch 2.13 on the CPU, aten/src/ATen/native/Embedding.cpp."""

_WIDE = re.compile(r"\b(double|float64|long|int64)\b", re.IGNORECASE)
_COMPUTED = re.compile(r"\b(float|float32|bfloat16|half|float16)\b", re.IGNORECASE)
_MIXED = "mixed dtype"
"""How torch 2.13 writes the dtypes of operands that it does not take together: those of inputs, and those of
parameters."""


def explained(error: Exception, model: nn.Module) -> ModelError | None:
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
