"""The loss scale of fp16, one policy for every engine: the formula of `torch.amp.GradScaler` (torch 2.13, amp/grad_scaler.py)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unishard.checkpoint.manifest import LossScaleFacts
from unishard.config import Precision

__all__ = ["LossScale"]

_GROWTH, _BACKOFF = 2.0, 0.5
_LARGEST = 2.0**127
"""Of fp32's powers of two: what a scale may grow to."""


class LossScale:
    """What the loss is multiplied by, and the gradients are divided by. 1 wherever nothing is scaled."""

    def __init__(self, cfg: Precision) -> None:
        self._scales = cfg.compute == "fp16"
        self._dynamic = self._scales and cfg.loss_scale == "dynamic"
        self._interval = cfg.loss_scale_growth_interval
        self._made = 0
        """Updates since the scale last changed."""
        self.value = 1.0
        """For the micro-batches of this window."""
        if self._scales:
            self.value = cfg.initial_loss_scale if isinstance(cfg.loss_scale, str) else float(cfg.loss_scale)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to go backward from. In fp32, since an fp16 loss would overflow at once."""
        return loss.float() * self.value if self._scales else loss

    def facts(self) -> dict[str, Any] | None:
        """What a checkpoint keeps; None where nothing is scaled, so that a run in fp16 that goes on from there begins with its own."""
        return {"value": self.value, "made": self._made} if self._scales else None

    def go_on(self, facts: LossScaleFacts) -> None:
        """Continue with the scale of a checkpoint, where it changes by itself; a fixed one is that of the config."""
        if self._dynamic:
            self.value, self._made = facts.value, facts.made % self._interval

    def end_window(self, *, skipped: bool) -> bool:
        """An update was made, or left out because a gradient was not finite. Every rank must say the same.

        Returns:
            Whether the scale may have been the cause, and has been lowered: it was dynamic, and above 1.
        """
        if not self._dynamic:
            return False
        if skipped:
            mends = self.value > 1.0
            self.value *= _BACKOFF
            self._made = 0
            return mends
        self._made += 1
        if self._made == self._interval:
            self._made = 0
            if self.value * _GROWTH <= _LARGEST:
                self.value *= _GROWTH
        return False
