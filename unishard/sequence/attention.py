"""Attention over a sequence of which each rank of a group has a part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unishard.errors import ModelError
from unishard.sequence import context
from unishard.sequence.context import KeyRule, SplitBatch
from unishard.sequence.documents import Documents, alike
from unishard.sequence.exchange import (
    gather_positions,
    heads_for_positions,
    positions_for_heads,
    repeats_to_divide,
)
from unishard.sequence.layout import PositionRange
from unishard.sequence.tiles import Scores, attend, attend_masked, tiles


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention for your own model, over whole sequences also where `parallel.sequence` gives each rank a part.

    Without an engine that splits sequences it is plain attention. Collective in the ranks that share a sample.

    Args:
        query: `[batch, heads, positions, dim]`, of this rank's positions.
        key: `[batch, key heads, positions, dim]`; the heads are a multiple of the key heads.
        value: `[batch, key heads, positions, dim of value]`.
        causal: Whether a query attends only to keys at its own place and before it.
        window: Only to keys nearer than this; `None` for all.
        chunk: Only to keys of the same chunk of so many positions of a document; `None` for all.
        scale: What scores are multiplied by; by default `dim ** -0.5`.
        dropout: Probability with which a weight is dropped.
        softcap: Bound of the scores, which become `softcap * tanh(score / softcap)`.
        sinks: `[heads]`: a score for each head that takes weight from the keys.

    Returns:
        `[batch, heads, positions, dim of value]`, of this rank's positions.

    Raises:
        ModelError: `parallel.sequence.method` is `ulysses` and the heads do not divide, or the keys are not at the
            positions of the queries.
    """
    rule = KeyRule(causal, window, chunk)
    scores = Scores(query.shape[-1] ** -0.5 if scale is None else scale, dropout, softcap, sinks)
    if context.current is None:  # no engine splits sequences
        whole: Documents = ((0, query.shape[2]),)
        return _of_documents(query, key, value, [PositionRange(0, query.shape[2])], [whole] * len(query), rule, scores)
    return split_attention(query, key, value, context.current, rule, scores)


def split_attention(
    query: Tensor, key: Tensor, value: Tensor, split: SplitBatch, rule: KeyRule | Tensor, scores: Scores
) -> Tensor:
    """As `attention`, for this rank's part of a micro-batch. Collective in the group.

    Args:
        query: As of `attention`.
        key: Likewise.
        value: Likewise.
        split: The micro-batch.
        rule: Or a mask of whole samples, `[batch, 1, sequence, sequence]`: true, or 0, for keys to attend to.
        scores: How scores become weights.
    """
    output: Tensor = _outside_graphs(query, key, value, split, rule, scores)
    return output


def _by_method(
    query: Tensor, key: Tensor, value: Tensor, split: SplitBatch, rule: KeyRule | Tensor, scores: Scores
) -> Tensor:
    if not query.shape[2] == key.shape[2] == split.part:
        raise ModelError(
            f"attention of {query.shape[2]} queries to {key.shape[2]} keys, where parallel.sequence gives each rank "
            f"{split.part} positions; only attention of a sequence to itself is supported, and not to what each part "
            "would get once more, such as the tokens of prompt or prefix tuning (LoRA works), registers or a class "
            "token: remove parallel.sequence"
        )
    if split.proving:
        return _position_by_position(query, key, value)
    if split.method == "ulysses" or (split.method == "auto" and query.shape[1] % split.group.size == 0):
        return _by_heads(query, key, value, split, rule, scores)
    return _by_keys(query, key, value, split, rule, scores)


# Not compiled: in graphs, the collectives of two groups may come in another order on another rank.
_outside_graphs = torch.compiler.disable(_by_method)  # type: ignore[no-untyped-call]


def _by_heads(
    query: Tensor, key: Tensor, value: Tensor, split: SplitBatch, rule: KeyRule | Tensor, scores: Scores
) -> Tensor:
    """DeepSpeed-Ulysses: each rank has all positions of some heads."""
    size, group = split.group.size, split.group
    heads = query.shape[1]
    if heads % size:
        raise ModelError(
            f"parallel.sequence.method is ulysses, but {heads} heads do not divide by {size} ranks; write auto or "
            "allgather"
        )
    repeats = repeats_to_divide(key.shape[1], heads, size)
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    if scores.sinks is not None:
        scores = scores._replace(sinks=scores.sinks.chunk(size)[group.rank])
    query, key, value = (split.layout.join(heads_for_positions(tensor, group), 2) for tensor in (query, key, value))
    runs = [PositionRange(0, split.length)]
    output = _of_samples(query, key, value, runs, split, rule, scores)
    return positions_for_heads(split.layout.split(output, 2), group)


def _by_keys(
    query: Tensor, key: Tensor, value: Tensor, split: SplitBatch, rule: KeyRule | Tensor, scores: Scores
) -> Tensor:
    """Each rank has its own queries and the keys of all positions."""
    key, value = (split.layout.join(gather_positions(tensor, split.group), 2) for tensor in (key, value))
    runs = split.layout.runs(split.group.rank, split.length)
    if isinstance(rule, Tensor):
        rule = split.layout.take(rule, split.group.rank, 2)
    return _of_samples(query, key, value, runs, split, rule, scores)


def _of_samples(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Sequence[PositionRange],
    split: SplitBatch,
    rule: KeyRule | Tensor,
    scores: Scores,
) -> Tensor:
    if isinstance(rule, Tensor):
        return attend_masked(query, key, value, rule, scores)
    return _of_documents(query, key, value, runs, split.documents_under(rule), rule, scores)


def _of_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Sequence[PositionRange],
    documents: Sequence[Documents],
    rule: KeyRule,
    scores: Scores,
) -> Tensor:
    """The attention of each sample; those with the same documents together."""
    outputs = []
    for rows, of_rows in alike(documents):
        parts = []
        for queries, keys, first in tiles(runs, of_rows, rule):
            part = (query[rows, :, queries], key[rows, :, keys], value[rows, :, keys])
            parts.append(attend(*part, first, rule, scores))
        outputs.append(parts[0] if len(parts) == 1 else torch.cat(parts, 2))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _position_by_position(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Something of each position's own query, key and value."""
    repeats = query.shape[1] // key.shape[1]
    own = value.repeat_interleave(repeats, 1)
    return own + (query + key.repeat_interleave(repeats, 1)).mean(-1, keepdim=True)
