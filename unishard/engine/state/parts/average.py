"""A moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist

from unishard.engine.state.average_shards import has_average
from unishard.engine.state.part import CheckpointSource, Part, Saved, lazy
from unishard.engine.state.tensors import StateTensors


class Average(Part):
    """Kept for later where the user has not asked for one yet."""

    def __init__(self, tensors: StateTensors, *, trains: bool) -> None:
        """Of the tensors of a run."""
        self._tensors, self._trains = tensors, trains
        self._note = ""

    def saved(self, group: dist.ProcessGroup) -> Saved:
        """As in `Part`."""
        return Saved(lazy(self._tensors.average_shards()), {})

    def check(self, source: CheckpointSource) -> None:
        """As in `Part`: it is complete."""
        if self._tensors.average is not None:
            self._tensors.average.require(source.tensors)

    def read(self, source: CheckpointSource) -> None:
        """As in `Part`."""
        average, self._tensors.saved_average = self._tensors.average, None
        if average is not None:
            self._note = average.read(source.tensors)
        elif self._trains and has_average(source.tensors):
            self._tensors.saved_average = source.tensors

    def resume(self, source: CheckpointSource, group: dist.ProcessGroup) -> Iterator[str]:
        """As in `Part`."""
        if self._note:
            yield self._note
