"""Set up the optimizer and the scheduler from the config or the arguments of `prepare`, checked before anything is
sharded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from unishard.config import Config
from unishard.contract.backend import OptimizerBuilder, OptimizerFactory
from unishard.engine.optim.kept_groups import separate
from unishard.engine.optim.optimizers import description_of_built, factory, from_factory, move_to_shards
from unishard.engine.optim.schedulers import SchedulerFactory, build_scheduler, check
from unishard.errors import ConfigError, Problem

__all__ = ["OptimizerSetup"]


class OptimizerSetup:
    """An `OptimizerBuilder` that also builds the scheduler, if the caller passed one."""

    def __init__(
        self,
        cfg: Config,
        model: nn.Module,
        optimizer: OptimizerFactory | torch.optim.Optimizer | None,
        scheduler: SchedulerFactory | LRScheduler | None,
    ) -> None:
        """Check everything; build nothing.

        Raises:
            ConfigError: The optimizer or scheduler is set twice, or would not train the model as configured.
        """
        problems = [
            Problem(section, f"is in the config and was also passed to prepare; remove one of them: {section}={given}")
            for section, given in (("optimizer", _class_name(optimizer)), ("scheduler", _class_name(scheduler)))
            if given and section in cfg.model_fields_set
        ]
        if problems:
            raise ConfigError(problems)
        if scheduler is not None:
            check(scheduler, optimizer)
        self._build = _builder(cfg, model, optimizer)
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
        self.optimizer = optimizer
        names = {id(parameter): name for name, parameter in pairs}
        self.groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        if self._scheduler is not None and self.scheduler is None:
            self.scheduler = build_scheduler(self._scheduler, optimizer)  # type: ignore[arg-type]  # not a scheduler, so a function
        self.description = description_of_built(optimizer, names)
        if self.scheduler is not None:
            self.description |= {
                "scheduler": type(self.scheduler).__name__,
                "first rates of the scheduler": self.scheduler.get_last_lr(),
            }
        return optimizer


def _class_name(given: object) -> str:
    return "" if given is None else type(given).__name__


def _builder(cfg: Config, model: nn.Module, given: OptimizerFactory | torch.optim.Optimizer | None) -> OptimizerBuilder:
    sharded = cfg.sharding.strategy != "no_shard"
    if given is None:
        return factory(cfg.optimizer, model)
    if isinstance(given, torch.optim.Optimizer):
        return move_to_shards(given, model, sharded=sharded)
    return from_factory(given, sharded=sharded)
