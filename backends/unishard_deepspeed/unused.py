"""Leaves parameters as they are that an update does not use, as plain torch and FSDP2 do; DeepSpeed counts a missing gradient as zero."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unishard_deepspeed import internals
from unishard_deepspeed.masters import Masters

__all__ = ["Unused"]


class Unused:
    """Watches which parameters get a gradient in an accumulation window, and keeps the optimizer from moving the others.

    Costs a call of `set.add` for each gradient, and in each update one all-reduce of a byte for each parameter.
    """

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        self._optimizer = optimizer
        pieces = internals.pieces_of_masters(optimizer)
        self._trained = internals.trained(optimizer)
        self._masters = Masters(internals.torch_optimizer(optimizer), pieces)
        self._used: set[Tensor] = set()
        self._left_out: set[Tensor] | None = None
        self._flags = torch.empty(len(self._trained), dtype=torch.uint8, device=device)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._used.add)  # type: ignore[no-untyped-call]
            for parameter in self._trained
        ]

    def find(self) -> None:
        """At the end of a window: find the parameters that no rank has used in it. Collective."""
        self._flags.copy_(torch.tensor([parameter in self._used for parameter in self._trained], dtype=torch.uint8))
        if dist.get_world_size() > 1:
            dist.all_reduce(self._flags, dist.ReduceOp.MAX)
        flags = self._flags.tolist()
        self._left_out = {parameter for parameter, used in zip(self._trained, flags, strict=True) if not used}

    def leaves_out(self, parameter: Tensor) -> bool:
        """After `find`: whether the update will pass over a parameter."""
        return self._left_out is not None and parameter in self._left_out

    def use(self, parameter: Tensor) -> None:
        """After `find`: the parameter was given a gradient by hand."""
        if self._left_out is not None:
            self._left_out.discard(parameter)

    def end_window(self) -> None:
        """Before the update: leave out of it what the window has not used. Collective, unless `find` was called."""
        if self._left_out is None:
            self.find()
        self._masters.left_out = self._left_out or set()
        self.forget()

    def forget(self) -> None:
        """The window is over."""
        self._used.clear()
        self._left_out = None

    def updated(self) -> None:
        """After the update: what was left out may get its first optimizer state in a later one."""
        if self._masters.left_out:
            internals.link_states_again(self._optimizer)

    def remove(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._masters.remove()
