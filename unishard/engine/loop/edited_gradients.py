"""Detect gradients that the user's code changed between a backward and the step; some engines would use them, others
never see it.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from unishard.distributed.host_numbers import HostRead
from unishard.engine.loop.call_order import CallOrder
from unishard.errors import ContractError

_PARAMETERS, _ELEMENTS = 8, 16
"""How much of the gradients is compared: clipping and zeroing change all of them."""
_FIRST, _EVERY = 3, 10
"""Which updates are looked at: the first ones, where a habit shows, and the host waits for the device once in each;
then every tenth, where the result is read in the next micro-batch, so that nothing waits."""


class EditedGradients:
    """Compares a few elements of the gradients that the model's parameters hold with what the last backward left there.

    At DeepSpeed's stages 2 and 3 they hold none, so there is nothing to see, and nothing to change either.
    """

    def __init__(self, module: nn.Module, order: CallOrder) -> None:
        self._module = module
        self._order = order
        self._kept: list[tuple[nn.Parameter, Tensor]] = []
        self._later: HostRead | None = None
        """Whether gradients of the last window that was looked at were changed."""
        self.found = False
        """Whether a gradient of this window was changed on this rank."""

    @torch.no_grad()
    def keep(self) -> None:
        """Keep some of what a backward has left."""
        self._kept.clear()
        if self._order.updates >= _FIRST and self._order.updates % _EVERY:
            return
        for parameter in self._module.parameters():
            gradient = _local(parameter.grad)
            if gradient is not None and gradient.numel():
                self._kept.append((parameter, _some(gradient).clone()))
                if len(self._kept) == _PARAMETERS:
                    return

    @torch.no_grad()
    def compare(self) -> None:
        """Compare that with what is there now, once; a gradient that is gone was changed too."""
        if self._later is not None:
            later, self._later = self._later, None
            self.found = self.found or bool(later.get())
        if not self._kept:
            return
        kept, self._kept = self._kept, []
        now = [_local(parameter.grad) for parameter, _ in kept]
        present = [gradient for gradient in now if gradient is not None]
        if len(present) < len(kept):
            self.found = True
            return
        changes = [(_some(gradient) != then).any() for gradient, (_, then) in zip(present, kept, strict=True)]
        changed = HostRead(torch.stack([change.to(changes[0].device) for change in changes]).any())
        if self._order.updates < _FIRST:
            self.found = self.found or bool(changed.get())
        else:
            self._later = changed

    def clear(self) -> None:
        """Compare nothing: the window is over, or the engine itself has changed its gradients."""
        self._kept.clear()
        self.found = False

    def refuse(self) -> NoReturn:
        """Raise ContractError."""
        self.clear()
        raise ContractError(
            "gradients were changed between engine.backward and engine.step, as by torch.nn.utils.clip_grad_norm_, "
            "which other engines would not see; remove that: clip with training.gradient_clipping in the config or "
            "engine.step(clip_grad_norm=1.0), edit a gradient with engine.set_grad, and drop a window with "
            "engine.discard()"
        )


def _local(gradient: Any) -> Tensor | None:
    """This rank's shard, if the gradient is a DTensor."""
    shard: Tensor | None = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return shard


def _some(gradient: Tensor) -> Tensor:
    return gradient.reshape(-1)[-_ELEMENTS:].nan_to_num()
