"""Gradients that are on their way to host memory before the update: from where the backward of their unit ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import final

import torch
from torch import Tensor, nn

from unishard_fsdp.cases.case import FSDPCase
from unishard_fsdp.sharding.local_shards import local


@final
class EarlyGradients(FSDPCase):
    """Copies each gradient behind its reduction, in the last backward of a window.

    An update that changes gradients first, by clipping or a divisor, needs them as they are then, and the window after
    it copies none early. An edit of the script's has the same effect.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], empty: Callable[[Tensor], Tensor]) -> None:
        """Register a hook on each parameter.

        Args:
            parameters: Sharded ones. FSDP2 calls these hooks after each reduction, while the stream is current that has
                reduced, and lets the computing stream wait for that one at the end of backward (torch 2.13,
                _fsdp_collectives.py, foreach_reduce). As in its own offload, the copies need no other stream: one that
                is added to later would be read there meanwhile.
            empty: Allocates page-locked host memory for a copy.
        """
        self._last = True
        """Whether the micro-batch that runs is the last of its window."""
        self._early, self._changed = True, False
        """Whether this window copies, and whether its gradients were changed since."""
        self._empty = empty
        self._sent: dict[Tensor, tuple[Tensor, Tensor]] = {}
        """By parameter, the gradient and its copy."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._reduced)  # type: ignore[no-untyped-call]
            for parameter in parameters
        ]

    def begin(self, *, last: bool) -> None:
        """Note which micro-batch runs."""
        self._last = last

    @torch.no_grad()
    def _reduced(self, parameter: Tensor) -> None:
        if self._last and self._early and parameter.grad is not None:
            shard = local(parameter.grad)
            self._sent[parameter] = parameter.grad, self._empty(shard).copy_(shard, non_blocking=True)

    def copy_of(self, parameter: nn.Parameter) -> Tensor | None:
        """The copy of what is the parameter's gradient now, if there is one. The host waits before it reads it."""
        gradient, copy = self._sent.get(parameter, (None, None))
        return copy if gradient is parameter.grad else None

    def change(self) -> None:
        """Drop the copies, before gradients are changed."""
        self._sent.clear()
        self._changed = True

    def forget(self) -> None:
        """Drop the copies."""
        self._sent.clear()
        self._early, self._changed = not self._changed, False

    def close(self) -> None:
        """Remove the hooks."""
        self._sent.clear()
        for hook in self._hooks:
            hook.remove()
