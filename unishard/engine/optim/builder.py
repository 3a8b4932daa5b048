"""Set up the optimizer and the scheduler from the config or the arguments of `prepare`, checked before anything is
sharded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from unishard.config import Optimizer, Scheduler
from unishard.contract.backend import OptimizerBuilder, OptimizerFactory
from unishard.engine.model.dtypes import is_kept
from unishard.engine.optim.optimizers import description_of_built, factory, from_factory, move_to_shards
from unishard.engine.optim.schedulers import SchedulerFactory, build_scheduler, check
from unishard.errors import ConfigError, Problem

# Parameter groups without parameters, such as the one that a framework makes for biases where adapters have none.


def without_empty(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, or one with the same state and group dicts that lacks the groups without parameters.

    DeepSpeed takes these out of the object that it is given (DeepSpeed 0.19.8, runtime/engine.py,
    _configure_optimizer), and a scheduler of the caller's has a rate for each.
    """
    filled = [group for group in optimizer.param_groups if group["params"]]
    if len(filled) == len(optimizer.param_groups):
        return optimizer
    own: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(own).update(vars(optimizer), param_groups=filled)
    vars(own).pop("step", None)  # a scheduler has set a `step` that is bound to `optimizer`
    # The warning is about `optimizer`, but its copy steps (torch 2.13, optim/lr_scheduler.py).
    warnings.filterwarnings(
        "ignore", r"Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`", UserWarning
    )
    return own


# -- Parameter groups of one compute dtype each: DeepSpeed's optimizers flatten a group into one tensor --


def separate(optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:
    """Move parameters that stay in fp32 (`precision.keep_fp32`) into groups of their own, with the same options, behind
    the others.

    The same for every engine, so that optimizers and checkpoints have the same groups. Changes nothing if nothing is
    kept.

    Args:
        optimizer: Has not stepped yet.
        scheduler: One that the caller has built on the optimizer, with a rate for each of its groups.

    Raises:
        ConfigError: There is such a scheduler, and groups would be moved.
    """
    others: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        places = [at for at, parameter in enumerate(group["params"]) if is_kept(parameter)]
        if 0 < len(places) < len(group["params"]):
            _refuse_with(scheduler)
            kept.append(_only(group, places))
            group.update(_only(group, [at for at in range(len(group["params"])) if at not in places]))
            others.append(group)
        else:
            (kept if places else others).append(group)
    if [*map(id, others + kept)] != [*map(id, optimizer.param_groups)]:
        _refuse_with(scheduler)
        optimizer.param_groups[:] = others + kept


def _only(group: dict[str, Any], places: list[int]) -> dict[str, Any]:
    lists = [key for key in ("params", "param_names") if key in group]
    return {**group, **{key: [group[key][at] for at in places] for key in lists}}


def _refuse_with(scheduler: LRScheduler | None) -> None:
    if scheduler is not None:
        what = (
            f"{type(scheduler).__name__} has a rate for each group of the optimizer, and precision.keep_fp32 makes "
            "other groups; pass a"
        )
        raise ConfigError(
            [Problem("scheduler", f"{what} function that builds it, such as lambda optimizer: StepLR(optimizer, 30)")]
        )


class OptimizerSetup:
    """An `OptimizerBuilder` that also builds the scheduler, if the caller passed one."""

    def __init__(
        self,
        model: nn.Module,
        section: Optimizer,
        schedule: Scheduler,
        optimizer: OptimizerFactory | torch.optim.Optimizer | None,
        scheduler: SchedulerFactory | LRScheduler | None,
        *,
        sharded: bool,
    ) -> None:
        """Check everything; build nothing.

        Args:
            model: Not sharded yet.
            section: What is used if the caller has passed no optimizer.
            schedule: What is used if the caller has passed no scheduler.
            optimizer: What the caller has passed.
            scheduler: What the caller has passed.
            sharded: Whether the optimizer will step shards.

        Raises:
            ConfigError: The optimizer or scheduler would not train the model as configured.
        """
        if scheduler is not None:
            check(scheduler, optimizer)
        self._build = _builder(model, section, optimizer, sharded=sharded)
        self.from_caller = not (optimizer is scheduler is None)
        """Whether what is built depends on the caller's code, too."""
        self.schedule = schedule
        """The section, which counts if the caller has passed no scheduler."""
        self.groups: list[list[str]] = []
        """Names of the parameters in each optimizer group, once the optimizer is built."""
        self._scheduler = scheduler
        self.scheduler: LRScheduler | None = scheduler if isinstance(scheduler, LRScheduler) else None
        """The caller's scheduler, once the optimizer is built."""
        self.optimizer: torch.optim.Optimizer | None = None
        """What was built, or the caller's own object."""
        self.description: dict[str, Any] = {}
        """What was built, in what must be equal on all ranks: classes, groups, rates."""

    def __call__(self, named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        """The optimizer over these trainable parameters."""
        pairs = list(named)
        optimizer: torch.optim.Optimizer = self._build(pairs)
        separate(optimizer, self.scheduler)
        self.optimizer, optimizer = optimizer, without_empty(optimizer)
        names = {id(parameter): name for name, parameter in pairs}
        self.groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        if self._scheduler is not None and self.scheduler is None:
            self.scheduler = build_scheduler(self._scheduler, self.optimizer)  # type: ignore[arg-type]  # not a scheduler, so a function
        self.description = description_of_built(optimizer, names)
        if self.scheduler is not None:
            self.description |= {
                "scheduler": type(self.scheduler).__name__,
                "first rates of the scheduler": self.scheduler.get_last_lr(),
            }
        return optimizer


def _builder(
    model: nn.Module, section: Optimizer, given: OptimizerFactory | torch.optim.Optimizer | None, *, sharded: bool
) -> OptimizerBuilder:
    if given is None:
        return factory(section, model)
    if isinstance(given, torch.optim.Optimizer):
        return move_to_shards(given, model, sharded=sharded)
    return from_factory(given, sharded=sharded)
