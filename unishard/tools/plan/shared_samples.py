"""Lets a model without data attend as on a rank that shares its samples (`parallel.sequence`). Imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from unishard.config import SequenceParallel
from unishard.sequence import context
from unishard.sequence.context import SplitBatch
from unishard.sequence.group import SequenceGroup
from unishard.sequence.hybrid_functions import mixes_by_functions
from unishard.sequence.layout import PositionLayout
from unishard.sequence.method import sequence_of
from unishard.sequence.tiles import measured
from unishard.sequence.transformers_models import is_transformers, use_split_attention
from unishard.tools.plan.activations import Kind

Exchange = tuple[Kind, int]
"""A collective, and the bytes of its full tensors on one rank."""


@dataclass(frozen=True, slots=True)
class _CountingGroup(SequenceGroup):
    """Of which there are no other ranks; notes what it would exchange."""

    exchanged: list[Exchange] = field(default_factory=list)

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        self.exchanged.append(("all_to_all", sent.nbytes))

    def all_gather(self, everyones: Sequence[Tensor], tensor: Tensor) -> None:
        self.exchanged.append(("all_gather", tensor.nbytes * len(everyones)))


def is_hybrid(model: nn.Module) -> bool:
    """Whether some layers of a model mix positions outside of attention."""
    return any(map(mixes_by_functions, model.modules()))


@contextmanager
def sharing_samples(
    model: nn.Module, section: SequenceParallel, rows: int, part: int
) -> Iterator[tuple[int, Sequence[Exchange]]]:
    """A block in which a model exchanges tensors with a group of which there are no other ranks.

    Args:
        model: Without data.
        section: Nothing changes where it is off.
        rows: Samples of a micro-batch.
        part: Positions that a rank has of each, at the least.

    Yields:
        The positions that it has, with padding, and what was exchanged until then.

    Raises:
        ModelError: The model computes attention by its own code.
    """
    if not section.on:
        yield part, ()
        return
    section = sequence_of(model, section)
    size = section.size
    layout = PositionLayout(size, balanced=section.method == "allgather")
    runs = layout.multiple // size
    part = -(-part // runs) * runs
    split = SplitBatch(
        group=(group := _CountingGroup(None, None, size, size - 1)),
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
            yield part, group.exchanged
    finally:
        context.current = None
        if restore is not None:
            restore()
