"""Attention of a run of queries to the keys of its document, in memory that grows with the sequence, not its square."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils.checkpoint import checkpoint

from unishard.sequence.context import KeyRule
from unishard.sequence.documents import Documents
from unishard.sequence.layout import PositionRange

_BLOCK = 1024
"""Queries whose scores are there at one time, where no fused kernel applies."""


_measured = False
"""Whether a block of `measured` is open."""

_LOWER_RIGHT: CausalBias = causal_lower_right(1, 2)
"""Of any lengths: torch (2.13) cannot make one where operations are looked at, as selective recomputation does."""


class Tile(NamedTuple):
    """Queries and the keys that they may attend to."""

    queries: slice
    """Of the rank's own positions."""
    keys: slice
    """Of the whole sequence."""
    first: int
    """The place of the first query among the keys."""


class Scores(NamedTuple):
    """How scores become weights."""

    scale: float
    dropout: float = 0.0
    softcap: float | None = None
    sinks: Tensor | None = None
    """`[heads]`: a score for each head that takes weight from the keys."""


@contextmanager
def measured() -> Iterator[None]:
    """A block in which attention takes the memory that it takes on a GPU, whose kernels need no tensor for a causal
    mask of fewer queries than keys; on a CPU torch makes one. For plans: what it computes is wrong.
    """
    global _measured
    _measured = True
    try:
        yield
    finally:
        _measured = False


def tiles(runs: Sequence[PositionRange], documents: Documents, rule: KeyRule) -> Iterator[Tile]:
    """The tiles of a rank that has these runs of a sample."""
    place = 0
    for run in runs:
        for start, end in _pieces(documents, rule.chunk):
            first, last = max(start, run.start), min(end, run.start + run.length)
            if first < last:
                queries = slice(place + first - run.start, place + last - run.start)
                yield Tile(queries, slice(start, last if rule.causal else end), first - start)
        place += run.length


def _pieces(documents: Documents, chunk: int | None) -> Iterator[tuple[int, int]]:
    for start, end in documents:
        step = chunk or end - start
        for first in range(start, end, step):
            yield first, min(first + step, end)


def attend(query: Tensor, key: Tensor, value: Tensor, first: int, rule: KeyRule, scores: Scores) -> Tensor:
    """Attention of the queries of a tile to its keys.

    Args:
        query: `[batch, heads, queries, dim]`.
        key: `[batch, key heads, keys, dim]`; the heads are a multiple of the key heads.
        value: As `key`; its dim may differ.
        first: The place of the first query among the keys.
        rule: Its chunks are tiles already.
        scores: How scores become weights.

    Returns:
        `[batch, heads, queries, dim of value]`.
    """
    outputs, queries, keys = [], query.shape[2], key.shape[2]
    fused = scores.softcap is None and scores.sinks is None
    if fused and rule.window is None and (queries == keys or not rule.causal):
        return _fused(query, key, value, rule, scores)
    reach = keys if rule.window is None else rule.window
    block = _BLOCK if rule.window is None else max(_BLOCK, rule.window)
    for start in range(0, queries, block):
        stop = min(start + block, queries)
        low = max(0, first + start - reach + 1)
        high = first + stop if rule.causal else min(keys, first + stop + reach - 1)
        part = (query[:, :, start:stop], key[:, :, low:high], value[:, :, low:high])
        if fused and rule.window is None:
            outputs.append(_fused(*part, rule, scores))
        elif fused or queries <= block:
            outputs.append(_within(*part, first + start - low, rule, scores))
        else:  # else the weights of all blocks would be in memory until backward
            outputs.append(checkpoint(_within, *part, first + start - low, rule, scores, use_reentrant=False))
    return torch.cat(outputs, 2)


def _within(query: Tensor, key: Tensor, value: Tensor, first: int, rule: KeyRule, scores: Scores) -> Tensor:
    """Of queries of which the first has this place among the keys, by a mask."""
    at = torch.arange(first, first + query.shape[2], device=query.device)[:, None]
    allowed = _allowed(at, torch.arange(key.shape[2], device=query.device)[None, :], rule)
    return attend_masked(query, key, value, allowed, scores)


def attend_masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """Attention under a mask, `[batch, 1 or heads, queries, keys]`: true, or 0, for keys to attend to."""
    allowed = mask if mask.dtype == torch.bool else mask == 0
    fused = scores.softcap is None and scores.sinks is None
    return (_masked if fused else _eager)(query, key, value, allowed, scores)


def _allowed(at: Tensor, keyed: Tensor, rule: KeyRule) -> Tensor:
    allowed = keyed <= at if rule.causal else torch.ones_like(keyed <= at)
    if rule.window is not None:
        allowed = allowed & ((at - keyed).abs() < rule.window)
    return allowed


def _fused(query: Tensor, key: Tensor, value: Tensor, rule: KeyRule, scores: Scores) -> Tensor:
    square = query.shape[2] == key.shape[2] or _measured
    bias = None if square or not rule.causal else _ending_together(query.shape[2], key.shape[2])
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=bias,
        dropout_p=scores.dropout,
        is_causal=rule.causal and square and query.shape[2] > 1,
        scale=scores.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _ending_together(queries: int, keys: int) -> CausalBias:
    """The causal mask whose last query sees the last key."""
    _LOWER_RIGHT.seq_len_q, _LOWER_RIGHT.seq_len_kv = queries, keys
    return _LOWER_RIGHT


def _masked(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scores: Scores) -> Tensor:
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=allowed,
        dropout_p=scores.dropout,
        scale=scores.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _eager(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scores: Scores) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    logits = query @ key.transpose(2, 3) * scores.scale
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
    if scores.sinks is not None:
        sinks = scores.sinks.reshape(1, -1, 1, 1).expand(len(logits), -1, logits.shape[2], 1)
        logits = torch.cat([logits, sinks.to(logits.dtype)], -1)
    weights = torch.softmax(logits, -1, dtype=torch.float32).to(query.dtype)
    if scores.sinks is not None:
        weights = weights[..., :-1]
    return functional.dropout(weights, scores.dropout) @ value
