"""Checks and builds the scheduler that a caller has passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unishard.errors import ConfigError, Problem

SchedulerFactory = Callable[[Any], Any]
"""Builds an `LRScheduler` from the optimizer that it is given."""


def check(scheduler: LRScheduler | SchedulerFactory, optimizer: object) -> None:
    """Check a scheduler before anything is sharded.

    Args:
        scheduler: A scheduler, or a function that builds one.
        optimizer: The optimizer that was passed.

    Raises:
        ConfigError: It is not a scheduler, needs a metric, or belongs to another optimizer.
    """
    if isinstance(scheduler, LRScheduler):
        _check_kind(scheduler)
        if scheduler.optimizer is not optimizer:
            _refuse(
                f"{type(scheduler).__name__} belongs to an optimizer that was not passed to prepare; pass that "
                "optimizer too, or pass a "
                "function such as lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)"
            )
    elif not callable(scheduler):
        _refuse(
            f"is a {type(scheduler).__name__}; pass a torch.optim.lr_scheduler.LRScheduler, or a function that builds "
            "one"
        )


def build_scheduler(build: SchedulerFactory, optimizer: Optimizer) -> LRScheduler:
    """Build a scheduler with the caller's function, and check it.

    Raises:
        ConfigError: It did not return a scheduler, or one that needs a metric or belongs to another optimizer.
    """
    scheduler: object = build(optimizer)
    if not isinstance(scheduler, LRScheduler):
        _refuse(f"function returned {type(scheduler).__name__}; it must return a torch.optim.lr_scheduler.LRScheduler")
    _check_kind(scheduler)
    if scheduler.optimizer is not optimizer:
        _refuse(
            f"function returned a {type(scheduler).__name__} of another optimizer; build it from the function's "
            "argument"
        )
    return scheduler


def _check_kind(scheduler: LRScheduler) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        _refuse(
            "ReduceLROnPlateau needs a metric, which is not available in an update; build it on engine.optimizer after "
            "prepare, leave the config's schedule constant, and call its step(metric) where you compute the metric"
        )


def _refuse(what: str) -> NoReturn:
    raise ConfigError([Problem("scheduler", what)])
