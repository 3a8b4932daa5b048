"""Tiny sizes, and samples for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dev.models.case import Batch, drawn

__all__ = ["LENGTH", "SIZES", "VOCABULARY", "audio", "image", "labeled", "masked", "sequence_pair", "tokens"]

VOCABULARY, LENGTH = 61, 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
"""Fields that most configs of transformers have."""


def tokens(index: int) -> Batch:
    """For a language model."""
    ids = drawn(index).integers(3, VOCABULARY, LENGTH)
    return {"input_ids": ids, "labels": ids.clone()}


def masked(index: int) -> Batch:
    """For a masked language model: labels of their own."""
    ids, labels = (drawn(index, purpose).integers(3, VOCABULARY, LENGTH) for purpose in (0, 1))
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones(LENGTH, dtype=torch.long)}


def labeled(index: int) -> Batch:
    """For a classifier of text."""
    return masked(index) | {"labels": torch.tensor(index % 2)}


def sequence_pair(index: int) -> Batch:
    """For an encoder and a decoder."""
    return {
        "input_ids": drawn(index).integers(3, VOCABULARY, LENGTH),
        "labels": drawn(index, 1).integers(3, VOCABULARY, LENGTH - 2),
    }


def image(size: int) -> Callable[[int], Batch]:
    """For a classifier of images of 5 classes."""
    return lambda index: {"pixel_values": drawn(index).normal(3, size, size), "labels": torch.tensor(index % 5)}


def audio(index: int) -> Batch:
    """For a classifier of sounds."""
    return {"input_values": drawn(index).normal(400), "labels": torch.tensor(index % 2)}
