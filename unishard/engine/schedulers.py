"""A learning rate that a scheduler object of torch decides, instead of the config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unishard.errors import ConfigError, Problem

__all__ = ["SchedulerFactory", "TorchSchedule", "check", "made"]

SchedulerFactory = Callable[[Any], Any]
"""Builds an `LRScheduler` from the optimizer that it is given."""


def check(scheduler: LRScheduler | SchedulerFactory, optimizer: object) -> None:
    """Check what a caller passes, before anything is sharded.

    Args:
        scheduler: A scheduler, or a function that builds one.
        optimizer: What was passed as the optimizer.

    Raises:
        ConfigError: It is no scheduler, needs a metric, or was made on another optimizer.
    """
    if isinstance(scheduler, LRScheduler):
        _check_kind(scheduler)
        if scheduler.optimizer is not optimizer:
            _refuse(
                f"{type(scheduler).__name__} was made on an optimizer that prepare was not given; pass that one too, or pass a function "
                "instead, such as lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)"
            )
    elif not callable(scheduler):
        _refuse(f"is a {type(scheduler).__name__}; pass a torch.optim.lr_scheduler.LRScheduler, or a function from an optimizer to one")


def made(build: SchedulerFactory, optimizer: Optimizer) -> LRScheduler:
    """What a caller's function makes of the optimizer, checked.

    Raises:
        ConfigError: It returned no scheduler, one that needs a metric, or one of another optimizer.
    """
    scheduler: object = build(optimizer)
    if not isinstance(scheduler, LRScheduler):
        _refuse(f"function returned {type(scheduler).__name__}; it must return a torch.optim.lr_scheduler.LRScheduler")
    _check_kind(scheduler)
    if scheduler.optimizer is not optimizer:
        _refuse(f"function returned a {type(scheduler).__name__} of another optimizer; build it from its argument")
    return scheduler


def _check_kind(scheduler: LRScheduler) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        _refuse(
            "ReduceLROnPlateau needs a metric, which an update does not have; leave it out and set group['lr'] of each group of "
            "engine.optimizer.param_groups where you measure it, which a constant schedule leaves as it is"
        )


class TorchSchedule:
    """Steps a torch scheduler once for each real update."""

    def __init__(self, scheduler: LRScheduler, param_groups: list[dict[str, Any]]) -> None:
        """As `unishard.engine.schedule.Schedule`.

        Args:
            scheduler: Its optimizer's group dicts are the live ones.
            param_groups: Of the optimizer that steps.
        """
        self._scheduler = scheduler
        self._groups = param_groups

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group in the next update."""
        return float(self._groups[0]["lr"])

    def advance(self) -> None:
        """One update has been made."""
        self._scheduler.step()
        for group in self._groups:
            if isinstance(group["lr"], Tensor):
                group["lr"] = group["lr"].item()


def _refuse(what: str) -> NoReturn:
    raise ConfigError([Problem("scheduler", what)])
