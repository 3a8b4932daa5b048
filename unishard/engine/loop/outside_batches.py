"""Find a training loop that reads its data past `engine.batches`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from unishard.data.loader import ShareLoader
from unishard.data.loader_checks import ranks_with_same
from unishard.engine.loop.training_passes import TrainingPasses

_ENOUGH = 2
"""Forwards that show a habit: one may be a trial, or follow a look at the data."""


class OutsideBatches:
    """Looks at the first forwards in training mode outside a loop over `engine.batches`."""

    def __init__(self, passes: TrainingPasses, warn: Callable[[str], None]) -> None:
        self._passes, self._warn = passes, warn
        self._read = ShareLoader.unfollowed
        self._fresh = self._compared = self._same = 0

    def skip(self) -> None:
        """After other forwards, such as those of an evaluation: what was read for them is not trained on."""
        self._read = ShareLoader.unfollowed

    def forward(self, inputs: Any) -> None:
        """Look at the inputs of a training forward that begins an update. Collective in the first ones.

        Args:
            inputs: This rank's.
        """
        before, self._read = self._read, ShareLoader.unfollowed
        if self._passes.open or not torch.is_grad_enabled():
            return
        if before != self._read:
            self._fresh += 1
            if self._fresh == _ENOUGH:
                self._warn(
                    "a unishard.dataloader is read without engine.batches(), so accumulation windows span epochs, and "
                    "a checkpoint has no data position; write `for batch in engine.batches(loader):`"
                )
        if dist.get_world_size() == 1 or self._compared == _ENOUGH:
            return
        self._compared += 1
        same = ranks_with_same(inputs)
        self._same += same is not None
        if same is not None and self._same == _ENOUGH:
            self._warn(
                f"ranks {same[0]} and {same[1]} train on the same batches, so the other ranks add nothing; read the "
                "data with `for batch "
                "in engine.batches(unishard.dataloader(dataset, cfg)):`, which gives each rank its own share"
            )
