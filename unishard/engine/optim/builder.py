"""What steps the parameters: optimizer and schedule, from whatever `prepare` was given, checked before anything is sharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from unishard.config import Config
from unishard.engine.optim.optimizers import adopt, checked, factory
from unishard.engine.optim.schedulers import SchedulerFactory, check, made
from unishard.errors import ConfigError, Problem
from unishard.plugins.backend import OptimizerBuilder, OptimizerFactory

__all__ = ["Recipe"]


class Recipe:
    """An `OptimizerBuilder` that also makes the scheduler, if the caller has one."""

    def __init__(
        self,
        cfg: Config,
        model: nn.Module,
        optimizer: OptimizerFactory | torch.optim.Optimizer | None,
        scheduler: SchedulerFactory | LRScheduler | None,
    ) -> None:
        """Check everything; build nothing.

        Raises:
            ConfigError: Something is given twice, or would not train the model as asked.
        """
        problems = [
            Problem(section, f"is in the config, and prepare was given one as well; remove one of the two: {section}={given}")
            for section, given in (("optimizer", _word(optimizer)), ("scheduler", _word(scheduler)))
            if given and section in cfg.model_fields_set
        ]
        if problems:
            raise ConfigError(problems)
        if scheduler is not None:
            check(scheduler, optimizer)
        self._build = _builder(cfg, model, optimizer)
        self.groups: list[list[str]] = []
        """Names of the parameters in each group of the optimizer, once it is built."""
        self._scheduler = scheduler
        self.scheduler: LRScheduler | None = scheduler if isinstance(scheduler, LRScheduler) else None
        """That of the caller, once the optimizer is built."""

    def __call__(self, named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        """The optimizer over these trainable parameters."""
        pairs = list(named)
        optimizer: torch.optim.Optimizer = self._build(pairs)
        names = {id(parameter): name for name, parameter in pairs}
        self.groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        if self._scheduler is not None and self.scheduler is None:
            self.scheduler = made(self._scheduler, optimizer)  # type: ignore[arg-type]  # no object, so a function
        return optimizer


def _word(given: object) -> str:
    return "" if given is None else type(given).__name__


def _builder(cfg: Config, model: nn.Module, given: OptimizerFactory | torch.optim.Optimizer | None) -> OptimizerBuilder:
    sharded = cfg.sharding.strategy != "no_shard"
    if given is None:
        return factory(cfg.optimizer, model)
    if isinstance(given, torch.optim.Optimizer):
        return adopt(given, model, sharded=sharded)
    return checked(given, sharded=sharded)
