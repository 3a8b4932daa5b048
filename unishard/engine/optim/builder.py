"""Set up the optimizer and the scheduler from the config or the arguments of `prepare`, checked before anything is
sharded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from unishard.config import Optimizer, Scheduler
from unishard.contract.backend import OptimizerBuilder, OptimizerFactory
from unishard.distributed.nested_optimizers import completed
from unishard.distributed.shard_optimizer import ShardOptimizer
from unishard.distributed.slices import slice_of
from unishard.engine.optim.compute_groups import separate
from unishard.engine.optim.eight_bit import on_blocks
from unishard.engine.optim.empty_groups import without_empty
from unishard.engine.optim.matrices import on_owners, on_shards
from unishard.engine.optim.optimizers import description_of_built, factory, from_factory, move_to_shards
from unishard.engine.optim.schedulers import SchedulerFactory, build_scheduler, check
from unishard.errors import ConfigError, Problem
from unishard.matrices.matrix_optimizer import MatrixOptimizer
from unishard.matrices.whole_tensors import WholeTensors


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
        matrices: Collection[str] = (),
    ) -> None:
        """Check everything; build nothing.

        Args:
            model: Not sharded yet.
            section: What is used if the caller has passed no optimizer.
            schedule: What is used if the caller has passed no scheduler.
            optimizer: What the caller has passed.
            scheduler: What the caller has passed.
            matrices: Names of the parameters that the config's optimizer updates as matrices.

        Raises:
            ConfigError: The optimizer or scheduler would not train the model as configured.
        """
        if scheduler is not None:
            check(scheduler, optimizer)
        self._build = _builder(model, section, optimizer, matrices)
        self._again = None if isinstance(optimizer, torch.optim.Optimizer) else optimizer
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
        optimizer = completed(self._build(pairs))
        separate(optimizer, self.scheduler)
        names = {id(parameter): name for name, parameter in pairs}
        self.optimizer, optimizer = optimizer, on_blocks(on_shards(without_empty(optimizer)), names)
        optimizer = on_owners(optimizer, names, [each for _, each in pairs], self._again)
        on_shards_only = isinstance(optimizer, ShardOptimizer) and not isinstance(optimizer, MatrixOptimizer)
        if on_shards_only and any(slice_of(each) is not None for _, each in pairs):
            what = f"is not supported with {type(self.optimizer).__name__}, which needs whole tensors; choose another"
            raise ConfigError([Problem("parallel", f"{what} optimizer")])
        self.groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        if self._scheduler is not None and self.scheduler is None:
            self.scheduler = build_scheduler(self._scheduler, self.optimizer)  # type: ignore[arg-type]  # not a scheduler, so a function
        self.description = description_of_built(optimizer, names)
        self.description["whole tensors"] = isinstance(optimizer, WholeTensors)
        if self.scheduler is not None:
            self.description |= {
                "scheduler": type(self.scheduler).__name__,
                "first rates of the scheduler": self.scheduler.get_last_lr(),
            }
        return optimizer


def _builder(
    model: nn.Module,
    section: Optimizer,
    given: OptimizerFactory | torch.optim.Optimizer | None,
    matrices: Collection[str],
) -> OptimizerBuilder:
    if given is None:
        return factory(section, model, matrices)
    if isinstance(given, torch.optim.Optimizer):
        return move_to_shards(given, model)
    return from_factory(given)
