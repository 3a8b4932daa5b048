"""This rank's shards of a moving average of the master weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from unishard.checkpoint import tensor_names
from unishard.checkpoint.tensor_reader import ReadRequest, Tensors
from unishard.distributed.shards import Shard


class AverageShards:
    """This rank's shards of a moving average, in fp32."""

    @torch.no_grad()
    def __init__(self, decay: float, live: Mapping[str, Shard]) -> None:
        """Start at the current master weights.

        Args:
            decay: The part of the average that an update keeps.
            live: This rank's shards of the master weights, by the first names of the parameters.
        """
        self._rest = 1 - decay
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self.live = [shard.values for shard in live.values()]
        """The master weights."""
        self.averages = [torch.empty_like(values, dtype=torch.float32).copy_(values) for values in self.live]
        """Their averages, in the same order."""
        self.by_name = {
            name: shard._replace(values=average)
            for (name, shard), average in zip(live.items(), self.averages, strict=True)
        }
        """The averages, by the first names of the parameters."""

    @torch.no_grad()
    def update(self) -> None:
        """Average in the master weights after an update. Not collective."""
        if all(values.dtype == torch.float32 for values in self.live):
            self._average(self.averages, self.live, 0)
            return
        for average, values in zip(self.averages, self.live, strict=True):
            average.lerp_(values.float(), self._rest)

    def to_save(self) -> dict[str, Shard]:
        """By checkpoint name."""
        return {tensor_names.AVERAGES + name: shard for name, shard in self.by_name.items()}

    @torch.no_grad()
    def read(self, tensors: Tensors) -> str:
        """Read the averages of a checkpoint; those that it lacks start at the current master weights.

        Returns:
            A note of those that it lacks; empty if there are none.
        """
        for average, values in zip(self.averages, self.live, strict=True):
            average.copy_(values)
        shards = self._found(tensors)
        tensors.read(
            ReadRequest(name, shard.interval.start, shard.values.view(-1), shard.order)
            for name, shard in shards.items()
        )
        lacking = len(self.by_name) - len(shards)
        which = (
            f"moving averages of {lacking} parameters" if has_average(tensors) else "a moving average of the weights"
        )
        return f"it lacks {which}; they start at the loaded weights" if lacking else ""

    def require(self, tensors: Tensors) -> None:
        """Check that what `read` reads is there. Reads no element.

        Raises:
            CheckpointError: It is incomplete.
        """
        for name, shard in self._found(tensors).items():
            tensors.require(name, shard.shape, shard.interval, shard.order)

    def _found(self, tensors: Tensors) -> dict[str, Shard]:
        """Those that the checkpoint has, by their name in it."""
        return {name: shard for name, shard in self.to_save().items() if name in tensors}


def has_average(tensors: Tensors) -> bool:
    """Whether a checkpoint has a moving average."""
    return any(name.startswith(tensor_names.AVERAGES) for name in tensors)
