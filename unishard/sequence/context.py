"""What attention, recurrences and convolutions must know of a micro-batch, of which each rank of a group has a part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    unpadded: int
    """Where the padding begins that was added to them."""
    documents: Sequence[Documents]
    """Of each sample."""
    masked: bool
    """Whether they are known of a mask, not of positions that begin again."""
    joined: set[KeyRule]
    """The rules under which the model does not keep packed documents apart."""
    recurrences: str = "auto"
    """`heads`, `states`, or `auto`: the one that sends less."""
    mixed_heads: set[str] = field(default_factory=set)
    """Functions declared by heads that a proof has seen to mix them."""
    proving: bool = False
    """Whether attention leaves each position by itself (`unishard.sequence.proof`)."""

    def documents_under(self, rule: KeyRule) -> Sequence[Documents]:
        """The documents that a rule keeps apart; padding is one of its own where tokens would see it."""
        joined = rule in self.joined and not self.masked
        documents = self.whole_samples if joined else self.documents
        return documents if rule.causal else [_cut(each, self.unpadded) for each in documents]

    @property
    def separate_documents(self) -> Sequence[Documents]:
        """Packed documents of each sample, and padding that was added to it; a mask is the model's own to read."""
        documents = self.whole_samples if self.masked else self.documents
        return [_cut(each, self.unpadded) for each in documents]

    @property
    def packed(self) -> bool:
        """Whether a sample has several documents, without padding."""
        starts = ([start for start, _ in each if start < self.unpadded] for each in self.documents)
        return not self.masked and any(len(each) > 1 for each in starts)

    @property
    def whole_samples(self) -> Sequence[Documents]:
        """One document each."""
        return [((0, self.length),)] * len(self.documents)

    @property
    def part(self) -> int:
        """Positions that a rank has."""
        return self.length // self.group.size


def _cut(documents: Documents, place: int) -> Documents:
    """The documents with a border at a place."""
    return tuple(
        piece
        for start, end in documents
        for piece in ([(start, place), (place, end)] if start < place < end else [(start, end)])
    )


current: SplitBatch | None = None
"""In a forward or a backward of an engine with `parallel.sequence`: its micro-batch."""
