"""Parameters that a rank may not use: which of them no rank has used in an accumulation window."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["ConditionalParameters"]


class ConditionalParameters:
    """The sharded parameters of whole units. One that no rank has used in a window has no gradient, as in plain torch."""

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self.parameters = parameters
        self.used: set[Tensor] = set()
        """Those that this rank has used since the last update."""
        self._flags = torch.empty(len(parameters), dtype=torch.uint8, device=device)
        self._found = False

    def find(self) -> None:
        """At the end of a window, once: take away the zeros that no rank has a gradient to add to. Collective."""
        if self._found or not self.parameters:
            return
        self._found = True
        self._flags.copy_(torch.tensor([parameter in self.used for parameter in self.parameters], dtype=torch.uint8))
        if dist.get_world_size() > 1:
            dist.all_reduce(self._flags, dist.ReduceOp.MAX)
        for parameter, used in zip(self.parameters, self._flags.tolist(), strict=True):
            if not used:
                parameter.grad = None

    def forget(self) -> None:
        """The window is over."""
        self.used.clear()
        self._found = False
