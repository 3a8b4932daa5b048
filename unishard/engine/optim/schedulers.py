"""A learning rate that a scheduler object of torch decides, instead of the config."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unishard.checkpoint.manifest import ScheduleFacts
from unishard.checkpoint.user_state import pack, unpack
from unishard.errors import CheckpointError, ConfigError, Problem

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
        """As `unishard.engine.optim.schedule.Schedule`.

        Args:
            scheduler: Its optimizer's group dicts are the live ones.
            param_groups: Of the optimizer that steps.
        """
        self._scheduler = scheduler
        self._groups = param_groups
        self._updates = 0

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group in the next update."""
        return float(self._groups[0]["lr"])

    def advance(self) -> None:
        """One update has been made."""
        self._updates += 1
        self._scheduler.step()
        for group in self._groups:
            if isinstance(group["lr"], Tensor):
                group["lr"] = group["lr"].item()

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps: updates made, and the scheduler's own state.

        Raises:
            CheckpointError: The state holds something else than tensors and what JSON has.
        """
        try:
            state, tensors = pack(self._scheduler.state_dict())
        except CheckpointError as problem:
            raise CheckpointError(f"{type(self._scheduler).__name__} cannot be saved: {problem}") from problem
        if tensors:
            raise CheckpointError(f"the state of {type(self._scheduler).__name__} holds tensors, which no scheduler of torch does")
        return {"updates": self._updates, "torch": {"class_name": type(self._scheduler).__name__, "state": state}}

    def go_on(self, facts: ScheduleFacts, then: Sequence[Mapping[str, Any]]) -> None:
        """Continue where a scheduler of the same class was; after another schedule, after as many updates.

        Args:
            facts: Of the checkpoint.
            then: The options of the groups in it; none where the groups were others.

        Raises:
            CheckpointError: It had another schedule, and this one is further already.
        """
        if facts.torch is None or facts.torch["class_name"] != type(self._scheduler).__name__:
            if self._updates > facts.updates:
                raise CheckpointError(
                    f"{type(self._scheduler).__name__} has made {self._updates} updates and cannot go back to {facts.updates}, since the "
                    "checkpoint has another schedule; prepare the model anew and load before the first update"
                )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of steps without one of the optimizer
                for _ in range(facts.updates - self._updates):
                    self.advance()
            return
        self._updates = facts.updates
        self._scheduler.load_state_dict(unpack(facts.torch["state"], _no_tensor))
        written = ("lr", *(_CYCLED if _cycles(self._scheduler) else ()))
        for group, options in zip(self._groups, then, strict=bool(then)):
            for key in written:
                if key in options:
                    group[key] = tuple(options[key]) if isinstance(options[key], list) else options[key]


_CYCLED = ("momentum", "betas")
"""Options that OneCycleLR and CyclicLR write beside the rate (torch 2.13, optim/lr_scheduler.py)."""


def _cycles(scheduler: Any) -> bool:
    """Whether it writes them, or one that it is made of does."""
    return getattr(scheduler, "cycle_momentum", False) or any(map(_cycles, getattr(scheduler, "_schedulers", ())))


def _no_tensor(name: str) -> Tensor:
    raise CheckpointError(f"the state of a scheduler refers to a tensor {name}, and none was saved with it; the manifest is damaged")


def _refuse(what: str) -> NoReturn:
    raise ConfigError([Problem("scheduler", what)])
