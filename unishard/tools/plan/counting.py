"""Groups of ranks of which there is only one, and which note what they would exchange. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from unishard.parallel.groups import Groups
from unishard.sequence.group import SequenceGroup
from unishard.tools.plan.activations import Kind


class Noted(NamedTuple):
    """A collective."""

    kind: Kind
    ranks: int
    stride: int
    nbytes: int


@dataclass(frozen=True)
class CountingGroups(Groups):
    """Of ranks that have layers or experts together."""

    noted: list[Noted] = field(default_factory=list)

    def all_reduce(self, values: Tensor) -> None:
        """See `Groups`."""
        self._note("all_reduce", values.nbytes)

    def all_gather(self, everyones: Tensor, values: Tensor) -> None:
        """See `Groups`."""
        self._note("all_gather", everyones.nbytes)

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive: list[int] | None = None, send: list[int] | None = None
    ) -> None:
        """See `Groups`."""
        self._note("all_to_all", sent.nbytes)

    def _note(self, kind: Kind, nbytes: int) -> None:
        self.noted.append(Noted(kind, self.size, 1, nbytes))


def counting_groups(noted: list[Noted], size: int) -> Groups:
    """Groups that note what they would exchange."""
    return CountingGroups(size, 0, None, None, noted=noted)


@dataclass(frozen=True, slots=True)
class CountingSequenceGroup(SequenceGroup):
    """Of ranks that have samples together."""

    stride: int = 1
    noted: list[Noted] = field(default_factory=list)

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """See `SequenceGroup`."""
        self.noted.append(Noted("all_to_all", self.size, self.stride, sent.nbytes))

    def all_gather(self, everyones: Sequence[Tensor], tensor: Tensor) -> None:
        """See `SequenceGroup`."""
        self.noted.append(Noted("all_gather", self.size, self.stride, tensor.nbytes * len(everyones)))
