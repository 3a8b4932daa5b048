"""Embeddings of which a rank has some rows or some features."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from unishard.distributed.slices import full_shape
from unishard.errors import ModelError
from unishard.parallel.tensor.cutter import Cutter, Forward


def shape_of(name: str, module: nn.Module) -> torch.Size:
    """The words and the features of a whole embedding.

    Raises:
        ModelError: It is another module, or does more than to look rows up.
    """
    if not isinstance(module, nn.Embedding):
        raise ModelError(
            f"parallel.tensor.plan cuts {name}, which is {type(module).__name__} and no plain nn.Embedding; leave "
            "it out of the plan, or, if peft has wrapped it, out of target_modules and trainable_token_indices"
        )
    if module.max_norm is not None or module.scale_grad_by_freq:
        raise ModelError(
            f"parallel.tensor cannot cut {name}, which has max_norm or scale_grad_by_freq; leave it out of "
            "parallel.tensor.plan"
        )
    return full_shape(module.weight)


def cut_words(cutter: Cutter, module: nn.Embedding) -> None:
    """Cut the vocabulary: a rank makes zeros of the words of others, and results are summed."""
    cutter.cut(module, "weight", 0)
    rows = len(module.weight)
    first = rows * cutter.groups.number
    padding = module.padding_idx
    if padding is not None:
        cutter.set(module, "padding_idx", padding - first if 0 <= padding - first < rows else None)
    for inside in module.children():  # sees this rank's words
        for each in inside.modules():
            cutter.count_parts(each)
    cutter.around(module, lambda forward: partial(_own_words, forward, first, rows))
    cutter.output(module, cutter.peers.sum)


def _own_words(forward: Forward, first: int, rows: int, input: Tensor) -> Tensor:
    own = input - first
    others = (own < 0) | (own >= rows)
    found: Tensor = forward(own.masked_fill(others, 0))
    return found.masked_fill(others.unsqueeze(-1), 0)


def cut_features(cutter: Cutter, module: nn.Embedding) -> None:
    """Cut the features, which are gathered."""
    cutter.cut(module, "weight", 1)
    cutter.output(module, cutter.peers.gather)
