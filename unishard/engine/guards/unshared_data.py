"""Find a training loop that reads its data past `engine.batches`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from unishard.data.loader import ShareLoader
from unishard.data.loader_checks import ranks_with_same
from unishard.engine.guards.guard import Guard, Looks
from unishard.engine.place import LoopPlace

_ENOUGH = 2
"""Forwards that show a habit: one may be a trial, or follow a look at the data."""


class UnsharedData(Guard):
    """Looks at the first forwards in training mode outside a loop over `engine.batches`.

    Without it: all ranks train on the same samples, accumulation windows span epochs, and a checkpoint has no position
    in the data.
    """

    looks = Looks.AT_UPDATES

    def __init__(self, in_loop: Callable[[], bool], place: LoopPlace, warn: Callable[[str], None], tensor: int) -> None:
        """Look at nothing yet.

        Args:
            in_loop: Whether a loop over a training loader runs.
            place: Where the loop is.
            warn: Says something on rank 0, once.
            tensor: Neighboring ranks that must train on the same.
        """
        self._tensor = tensor
        self._in_loop, self._place, self._warn = in_loop, place, warn
        self._read = ShareLoader.unfollowed
        self._fresh = self._compared = self._same = 0

    def skip(self) -> None:
        """After other forwards, such as those of an evaluation: what was read for them is not trained on."""
        self._read = ShareLoader.unfollowed

    @contextmanager
    def forward(self, inputs: Any) -> Iterator[None]:
        """Look at the inputs of a training forward that begins an update. Collective in the first ones."""
        if not self._place.micro_batch:
            self._look(inputs)
        yield

    def _look(self, inputs: Any) -> None:
        before, self._read = self._read, ShareLoader.unfollowed
        if self._in_loop() or not torch.is_grad_enabled():
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
        same = ranks_with_same(inputs, self._tensor)
        self._same += same is not None
        if same is not None and self._same == _ENOUGH:
            self._warn(
                f"ranks {same[0]} and {same[1]} train on the same batches, so the other ranks add nothing; read the "
                "data with `for batch "
                "in engine.batches(unishard.dataloader(dataset, cfg)):`, which gives each rank its own share"
            )
