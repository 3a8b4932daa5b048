"""The Llama of every comparison with loops of others: Hugging Face's, with sdpa attention, by its sizes."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from unishard.testing.models import llama

__all__ = ["LlamaSize", "llama_of"]


class LlamaSize(Protocol):
    """What a table of sizes has of a Llama."""

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""

    @property
    def inner(self) -> int:
        """Width of the MLP."""

    @property
    def layers(self) -> int:
        """How many."""

    @property
    def heads(self) -> int:
        """Of queries."""

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""

    @property
    def length(self) -> int:
        """The longest sequence."""


def llama_of(size: LlamaSize, *, kv_heads: int | None = None, tied: bool = False) -> nn.Module:
    """In training mode and fp32; the same random weights on every call, on the device that is set.

    Args:
        size: Its sizes.
        kv_heads: Of keys and values; by default as many as of queries.
        tied: Whether the head is the embedding.
    """
    return llama(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads if kv_heads is None else kv_heads,
        max_position_embeddings=size.length,
        tie_word_embeddings=tied,
        attn_implementation="sdpa",
    ).train()
