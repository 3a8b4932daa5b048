"""Warn of a run that trains no more, because each update is skipped."""

from __future__ import annotations

import logging

import torch.distributed as dist

from unishard.engine.guards.guard import Guard

_logger = logging.getLogger("unishard")

_LIMIT = 5


class SkippedUpdates(Guard):
    """Counts the updates in a row that were skipped because a gradient was not finite, and warns of the first long
    streak.

    Without it: a run with NaN in its weights goes on to its end, and trains nothing.
    """

    def __init__(self) -> None:
        self._streak = 0
        self._warned = dist.get_rank() != 0

    def after_outcome(self, *, skipped: bool, lowered: bool) -> None:
        """Count an update; not one for which fp16's loss scale was lowered, which is how its size is found."""
        if not skipped:
            self._streak = 0
        elif not lowered:
            self._streak += 1
        if self._streak == _LIMIT and not self._warned:
            self._warned = True
            _logger.warning(
                "%d updates in a row were skipped, because a gradient is infinite or NaN; nothing is trained while "
                "this lasts: check the "
                "batches and the loss, lower optimizer.lr, or set training.nonfinite to raise to stop at the first one",
                _LIMIT,
            )
