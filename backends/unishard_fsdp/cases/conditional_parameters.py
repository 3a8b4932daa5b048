"""Find conditional parameters that no rank has used in an accumulation window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard_fsdp.cases.case import FSDPCase
from unishard_fsdp.private.unused_gradients import fill_unused


@final
class ConditionalParameters(FSDPCase):
    """The sharded parameters of conditional modules.

    If no rank has used one in a window, it has no gradient, as in plain torch.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], modules: Sequence[nn.Module], device: torch.device) -> None:
        """Let every rank reduce them, used or not.

        Args:
            parameters: The parameters.
            modules: All sharded modules.
            device: Where this rank computes.
        """
        self._parameters = parameters
        self._used: set[Tensor] = set()
        """The parameters that this rank has used since the last update."""
        self._flags = torch.empty(len(parameters), dtype=torch.uint8, device=device)
        self._found = False
        fill_unused(modules, set(parameters), self._used)

    def finish(self) -> None:
        """Remove the zero gradients of parameters that no rank has used, once at the end of a window. Collective."""
        if self._found:
            return
        self._found = True
        complete = len(self._used) == len(self._parameters)
        if complete:
            self._flags.fill_(1)
        else:
            self._flags.copy_(
                torch.tensor([parameter in self._used for parameter in self._parameters], dtype=torch.uint8)
            )
        if dist.get_world_size() > 1:
            dist.all_reduce(self._flags, dist.ReduceOp.MAX)
        if complete:  # whatever the others used: the answer is known without waiting for the device
            return
        for parameter, used in zip(self._parameters, self._flags.tolist(), strict=True):
            if not used:
                parameter.grad = None

    def forget(self) -> None:
        """Reset at the end of a window."""
        self._used.clear()
        self._found = False
