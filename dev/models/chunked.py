"""Plays every case with the loss in chunks (`training.loss_chunk_tokens`), in one process, beside the plain loss."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dev.models import CASES
from dev.models.case import micro_batch
from dev.models.figures import Record
from unishard.errors import ModelError
from unishard.logits.forward import ChunkedForward

__all__ = [
    "DIFFERENT",
    "EQUAL",
    "FAILED",
    "HEADLESS",
    "REFUSED",
    "UNUSED",
    "outcome_in_chunks",
    "play_chunked",
]

EQUAL, REFUSED, DIFFERENT, FAILED = "equal", "refused: ", "differs: ", "fails: "
HEADLESS = "no head"
UNUSED = "equal, with all logits at once"
"""Where the loss is none of what a head returns."""
_RUN = "loss in chunks"
_TOKENS = 3
"""Of a chunk."""
_LOSS, _GRADIENT, _SMALL = 1e-6, 1e-5, 1e-2
"""Bounds: of a loss, relative; of a gradient, relative to its largest element, or to this share of the largest of all."""


class _Made(NamedTuple):
    loss: float
    gradients: dict[str, Tensor]


def outcome_in_chunks(records: Sequence[Record]) -> str:
    """What came of the run of a case; empty where there is none."""
    return next((record["chunked"] for record in records), "")


def play_chunked(name: str) -> list[Record]:
    """The record of a case."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    return [{"case": name, "run": _RUN, "chunked": compare(name)}]


def compare(name: str) -> str:
    """What came of a micro-batch of a case: as one of the constants, or beginning with one of them."""
    plain = _made(name, None)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            chunked = _made(name, _TOKENS)
    except ModelError as error:
        return HEADLESS if "has no head" in str(error) else REFUSED + _sentence(error)
    except Exception as error:  # whatever a model's own code raises
        return FAILED + _sentence(error)
    if difference := _difference(plain, chunked):
        return DIFFERENT + difference
    return UNUSED if any("does nothing" in str(each.message) for each in warned) else EQUAL


def _sentence(error: Exception) -> str:
    return re.split(r"\n|(?<=[a-z)])[.;] ", f"{type(error).__name__}: {error}", maxsplit=1)[0]


def _made(name: str, chunk_tokens: int | None) -> _Made:
    case = CASES[name]
    torch.manual_seed(0)
    model: Any = case.build().train()
    if chunk_tokens is not None:
        ChunkedForward(model, chunk_tokens)
    torch.manual_seed(1)
    loss = case.loss(model, micro_batch(case, 0, 0, 1))
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return _Made(loss.item(), gradients)


def _difference(plain: _Made, chunked: _Made) -> str:
    if abs(plain.loss - chunked.loss) > _LOSS * abs(plain.loss):
        return f"a loss of {chunked.loss}, not {plain.loss}"
    if plain.gradients.keys() != chunked.gradients.keys():
        return f"gradients of {sorted(plain.gradients.keys() ^ chunked.gradients.keys())[0]}"
    dense = {name: each.to_dense() for name, each in plain.gradients.items() if each.numel()}
    largest = max((float(each.abs().max()) for each in dense.values()), default=0.0)
    for name, each in dense.items():
        bound = _GRADIENT * max(float(each.abs().max()), _SMALL * largest)
        farthest = float((chunked.gradients[name].to_dense() - each).abs().max())
        if not farthest <= bound:
            return f"the gradient of {name} by {farthest:.0e}"
    return ""
