"""The user's torch optimizer inside DeepSpeed's, read by its own groups: DeepSpeed puts the masters there that it steps."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

__all__ = ["InnerOptimizer"]


class InnerOptimizer:
    """Whose parameters an optimizer was built for, and which masters DeepSpeed has put in their place."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Before `deepspeed.initialize`: the groups still hold the module's parameters."""
        self.optimizer = optimizer
        self.trained: list[nn.Parameter] = [tensor for group in optimizer.param_groups for tensor in group["params"] if tensor.numel()]
        """The module's parameters that DeepSpeed updates, in the same order on every rank; it leaves out those without elements."""

    @cached_property
    def masters(self) -> list[Tensor]:
        """After `deepspeed.initialize`: the live masters on this rank, whole or flat; at stage 3 none.

        Asked for between steps at first: during one, stages 1 and 2 leave only the group that steps in the optimizer.
        """
        return [master for group in self.optimizer.param_groups for master in group["params"]]

    @cached_property
    def whole(self) -> dict[nn.Parameter, Tensor]:
        """At stage 0: each parameter's master, which is itself where it is in the format of the masters."""
        return dict(zip(self.trained, (master for master in self.masters if master.numel()), strict=True))
