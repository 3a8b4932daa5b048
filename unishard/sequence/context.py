"""What attention must know of the micro-batch whose parts the ranks of a group have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unishard.sequence.documents import Documents
from unishard.sequence.group import SequenceGroup
from unishard.sequence.layout import PositionLayout


@dataclass(frozen=True, slots=True)
class KeyRule:
    """Which keys of its document a query attends to."""

    causal: bool = True
    window: int | None = None
    """Only keys nearer than this."""
    chunk: int | None = None
    """Only keys of the same chunk of so many positions."""


@dataclass(frozen=True, slots=True)
class SplitBatch:
    """A micro-batch of which each rank of a group has a part."""

    group: SequenceGroup
    layout: PositionLayout
    method: str
    """`ulysses`, `allgather`, or `auto`: the first where the heads divide."""
    length: int
    """Of the whole sequences, with padding."""
    documents: Sequence[Documents]
    """Of each sample."""
    masked: bool
    """Whether they are known of a mask, not of positions that begin again."""
    joined: set[KeyRule]
    """The rules under which the model does not keep packed documents apart."""
    proving: bool = False
    """Whether attention leaves each position by itself (`unishard.sequence.proof`)."""

    def documents_under(self, rule: KeyRule) -> Sequence[Documents]:
        """The documents that a rule keeps apart."""
        if rule not in self.joined or self.masked:
            return self.documents
        return [((0, self.length),)] * len(self.documents)

    @property
    def part(self) -> int:
        """Positions that a rank has."""
        return self.length // self.group.size


current: SplitBatch | None = None
"""In a forward or a backward of an engine with `parallel.sequence`: its micro-batch."""
