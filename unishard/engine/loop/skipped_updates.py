"""Warn of a run that trains no more, because each update is skipped."""

from __future__ import annotations

import logging

import torch.distributed as dist

_LIMIT = 5

_logger = logging.getLogger("unishard")


class SkippedUpdates:
    """Counts the updates in a row that were skipped because a gradient was not finite, and warns of the first long
    streak.
    """

    def __init__(self) -> None:
        self.streak = 0
        self._warned = dist.get_rank() != 0

    def add(self, *, skipped: bool, lowered: bool) -> None:
        """Count an update.

        Args:
            skipped: Whether it was skipped.
            lowered: Whether fp16's loss scale was lowered for it, which is how its size is found.
        """
        if not skipped:
            self.streak = 0
        elif not lowered:
            self.streak += 1
        if self.streak == _LIMIT and not self._warned:
            self._warned = True
            _logger.warning(
                "%d updates in a row were skipped, because a gradient is infinite or NaN; nothing is trained while "
                "this lasts: check the "
                "batches and the loss, lower optimizer.lr, or set training.nonfinite to raise to stop at the first one",
                _LIMIT,
            )
