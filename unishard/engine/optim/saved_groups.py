"""The parameter groups of a checkpoint, for those of a run that may divide parameters otherwise.

`parallel.tensor`, `parallel.expert` and `precision.keep_fp32` make groups of one into several, see `compute_groups`; a
checkpoint continues with other sizes of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from unishard.contract.training_facts import GroupRecord

T = TypeVar("T")


class SavedGroups(NamedTuple):
    """For each group now, where its parameters were."""

    places: tuple[int, ...]
    """Among the groups of the checkpoint."""
    options: tuple[Mapping[str, Any], ...]
    """What the group had there."""

    @property
    def in_order(self) -> bool:
        """Whether each group is at its place; a scheduler may also have empty ones, which no run has."""
        return self.places == (*range(len(self.places)),)

    def of(self, values: Sequence[T]) -> list[T] | None:
        """What a value for each group of the checkpoint is for each group now; None where values are missing."""
        return [values[at] for at in self.places] if max(self.places, default=0) < len(values) else None


def match(then: Sequence[GroupRecord], now: Sequence[Sequence[str]]) -> SavedGroups | None:
    """Find the groups of a checkpoint.

    Args:
        then: The groups of the checkpoint.
        now: The names of each group's parameters.

    Returns:
        None where parameters are in a group now that had different options, or are not the same.
    """
    place_of = {name: place for place, group in enumerate(then) for name in group.names}
    if place_of.keys() != {name for names in now for name in names}:
        return None
    places = []
    for number, names in enumerate(now):
        found = sorted({place_of[name] for name in names}) or ([number] if number < len(then) else [])
        if not found or any(then[place].options != then[found[0]].options for place in found):
            return None
        places.append(found[0])
    return SavedGroups(tuple(places), tuple(then[place].options for place in places))
