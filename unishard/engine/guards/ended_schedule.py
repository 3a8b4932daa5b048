"""Warn of a loop that goes on after the end of its schedule."""

from __future__ import annotations

import logging

import torch.distributed as dist

from unishard.engine.guards.guard import Guard
from unishard.engine.optim.schedule import Schedule
from unishard.engine.optim.torch_schedule import TorchSchedule
from unishard.engine.place import LoopPlace
from unishard.failures.compared_call import ComparedCall

_logger = logging.getLogger("unishard")


class EndedSchedule(Guard):
    """Warns once of updates with a learning rate of 0 after `scheduler.total_steps`.

    Without it: the run computes on, and trains nothing.
    """

    def __init__(self, schedule: Schedule | TorchSchedule, place: LoopPlace) -> None:
        self._schedule, self._place = schedule, place
        self._ended = False

    def before_step(self, call: ComparedCall) -> None:
        """Look at the rate of the update."""
        if self._ended or not call.last or self._schedule.lr != 0.0 or not self._schedule.ended:
            return
        self._ended = True
        if dist.get_rank():
            return
        _logger.warning(
            "update %d has a learning rate of 0 and trains nothing: scheduler.total_steps is reached; end the loop "
            "there, or raise scheduler.total_steps, or set scheduler.min_lr_ratio",
            self._place.updates + 1,
        )
