"""Llamas by size, what one token costs to train, and what cards can do."""

from __future__ import annotations

from typing import NamedTuple


class Size(NamedTuple):
    """A Llama and the micro-batch that it trains on."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    batch: int
    length: int


SIZES = {
    "tiny": Size(64, 160, 2, 4, 2, 128, False, 2, 32),
    "small": Size(1024, 2816, 4, 16, 8, 32_000, False, 2, 512),
    "medium": Size(1024, 2816, 12, 16, 8, 32_000, False, 4, 1024),
    "1b": Size(2048, 8192, 16, 32, 8, 128_256, True, 2, 4096),
    "3b": Size(3072, 8192, 28, 24, 8, 128_256, True, 1, 4096),
    "8b": Size(4096, 14_336, 32, 32, 8, 128_256, False, 1, 4096),
}
"""`1b` and `3b` have the shapes of Llama 3.2, `8b` that of Llama 3."""

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
"""Dense bf16 FLOP/s of the SXM parts by a word in the card's name, from the vendor's data sheets. Cards with another
limit (PCIe, NVL) give other values, so a name with such a word has none here."""
_OTHERS = ("PCIe", "NVL")


def parameters(size: Size) -> tuple[int, int]:
    """All of them, and those that multiply a token: not the embedding, whose rows are only looked up, unless it is the
    head as well.
    """
    head = size.hidden // size.heads
    attention = size.hidden * head * (2 * size.heads + 2 * size.kv_heads)
    block = attention + 3 * size.hidden * size.inner + 2 * size.hidden
    table = size.vocabulary * size.hidden
    body = size.layers * block + size.hidden + table
    return body + (0 if size.tied else table), body


def flops_per_token(size: Size) -> float:
    """Of forward and backward: 6 for each parameter that multiplies, and 12 * layers * hidden * length for attention,
    as torchtitan counts.

    That counts the whole square of attention, of which a causal mask needs half; recomputation is not counted.
    """
    return 6.0 * parameters(size)[1] + 12.0 * size.layers * size.hidden * size.length


def mfu(tokens_per_second: float, size: Size, peak: float) -> float:
    """Model FLOPs utilization: the part of the card's peak that the model's arithmetic uses."""
    return tokens_per_second * flops_per_token(size) / peak


def peak_of(card: str) -> float | None:
    """Dense bf16 FLOP/s of a card; None where its name says nothing known."""
    if any(word in card for word in _OTHERS):
        return None
    return next((peak for word, peak in PEAKS.items() if word in card), None)
