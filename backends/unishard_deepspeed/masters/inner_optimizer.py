"""The user's torch optimizer inside DeepSpeed's, whose groups hold the master weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor, nn


class InnerOptimizer:
    """An optimizer's original parameters, and the master weights by which DeepSpeed replaced them in its groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Call it before `deepspeed.initialize`, when the groups still hold the module's parameters."""
        self.optimizer = optimizer
        self.trained: list[nn.Parameter] = [
            tensor for group in optimizer.param_groups for tensor in group["params"] if tensor.numel()
        ]
        """The module's parameters that DeepSpeed updates, in the same order on every rank; it ignores empty ones."""
        self.of_group: dict[int, list[nn.Parameter]] = {
            id(group): [tensor for tensor in group["params"] if tensor.numel()] for group in optimizer.param_groups
        }
        """The same by group, by the identity of its dict, which DeepSpeed keeps."""

    @cached_property
    def masters(self) -> list[Tensor]:
        """The live master weights on this rank after `deepspeed.initialize`, full or flat; none at stage 3.

        First read between two steps: during a step, stages 1 and 2 keep only the stepping group in the optimizer.
        """
        return [master for group in self.optimizer.param_groups for master in group["params"]]

    @cached_property
    def full_masters(self) -> dict[nn.Parameter, Tensor]:
        """Each parameter's master weight at stage 0; the parameter itself if it has the master dtype."""
        return dict(zip(self.trained, (master for master in self.masters if master.numel()), strict=True))

    def stepping(self) -> Iterator[nn.Parameter]:
        """The module's parameters of the groups that the torch optimizer has now."""
        for group in self.optimizer.param_groups:
            yield from self.of_group[id(group)]
