"""Leaves parameters as they are that an update does not use, as plain torch and FSDP2 do; DeepSpeed counts a missing gradient as zero."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unishard_deepspeed import internals
from unishard_deepspeed.masters import Masters

__all__ = ["Unused"]


class Unused:
    """Watches which parameters get a gradient in an accumulation window, and keeps the optimizer from moving the others.

    Costs a call of `set.add` for each gradient, and in each update one all-reduce of a byte for each parameter, which goes on beside
    DeepSpeed's own work until the optimizer steps.
    """

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        self._optimizer = optimizer
        pieces = internals.pieces_of_masters(optimizer)
        self._trained = internals.trained(optimizer)
        self.masters = Masters(internals.torch_optimizer(optimizer), pieces, self._settle)
        self._used: set[Tensor] = set()
        self._found = False
        self._settled = True
        self._reduction: Any = None
        self._flags = torch.empty(len(self._trained), dtype=torch.uint8, device=device)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._used.add)  # type: ignore[no-untyped-call]
            for parameter in self._trained
        ]

    @property
    def left_out(self) -> Set[Tensor]:
        """After `find`: what the coming update does not move."""
        self._settle()
        return self.masters.left_out

    def find(self) -> None:
        """At the end of a window, once: begin to find the parameters that no rank has used in it. Collective."""
        if self._found:
            return
        self._found, self._settled = True, False
        self._flags.copy_(torch.tensor([parameter in self._used for parameter in self._trained], dtype=torch.uint8))
        if dist.get_world_size() > 1:
            self._reduction = dist.all_reduce(self._flags, dist.ReduceOp.MAX, async_op=True)

    def _settle(self) -> None:
        """Wait for the answer, once."""
        if self._settled:
            return
        self._settled = True
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None
        flags = self._flags.tolist()
        self.masters.left_out = {parameter for parameter, used in zip(self._trained, flags, strict=True) if not used}

    def take_up(self, parameter: Tensor) -> None:
        """After `find`: the update moves this one too, because it has been given a gradient."""
        self._settle()
        self.masters.left_out.discard(parameter)

    def forget(self) -> None:
        """The window is over."""
        self._settle()
        if self.masters.left_out:  # it may get its first optimizer state in a later update
            internals.link_states_again(self._optimizer)
        self._used.clear()
        self._found = False

    def remove(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self.masters.remove()
