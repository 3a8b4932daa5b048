"""Lets a model without data attend as on a rank that shares its samples (`parallel.sequence`). Imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from unishard.config import Parallel
from unishard.sequence import context
from unishard.sequence.context import SplitBatch
from unishard.sequence.layout import PositionLayout
from unishard.sequence.method import sequence_of
from unishard.sequence.tiles import measured
from unishard.sequence.transformers_models import is_transformers, use_split_attention
from unishard.tools.plan.counting import CountingSequenceGroup, Noted


@contextmanager
def sharing_samples(model: nn.Module, parallel: Parallel, rows: int, part: int, noted: list[Noted]) -> Iterator[int]:
    """A block in which a model exchanges tensors with a group of which there are no other ranks.

    Args:
        model: Without data.
        parallel: Nothing changes where `sequence` is off.
        rows: Samples of a micro-batch.
        part: Positions that a rank has of each, at the least.
        noted: Gets what is exchanged.

    Yields:
        The positions that it has, with padding.

    Raises:
        ModelError: The model computes attention by its own code.
    """
    if not parallel.sequence.on:
        yield part
        return
    section = sequence_of(model, parallel.sequence)
    size = section.size
    layout = PositionLayout(size, balanced=section.method == "allgather")
    part = -(-part // layout.runs_of_a_rank) * layout.runs_of_a_rank
    split = SplitBatch(
        group=CountingSequenceGroup(None, None, size, size - 1, parallel.tensor.size, noted),
        layout=layout,
        method=section.method,
        length=part * size,
        unpadded=part * size,
        documents=[((0, part * size),)] * rows,
        masked=False,
        joined=set(),
        recurrences=section.recurrences,
    )
    restore = use_split_attention(model) if is_transformers(model) else None
    context.current = split
    try:
        with measured():
            yield part
    finally:
        context.current = None
        if restore is not None:
            restore()
