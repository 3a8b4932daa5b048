"""The loss scale of fp16, one policy for every engine: the formula of `torch.amp.GradScaler` (torch 2.13,
amp/grad_scaler.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unishard.config import Precision
from unishard.contract.training_facts import LossScaleFacts

_GROWTH, _BACKOFF = 2.0, 0.5
_LARGEST = 2.0**127
"""The largest scale: the largest power of two in fp32."""


class LossScale:
    """The factor by which the loss is multiplied and gradients are divided. 1 except in fp16."""

    def __init__(self, cfg: Precision) -> None:
        self._scales = cfg.compute == "fp16"
        self._dynamic = self._scales and cfg.loss_scale == "dynamic"
        self._interval = cfg.loss_scale_growth_interval
        self._made = 0
        """Updates since the scale last changed."""
        self.value = 1.0
        """The scale in this accumulation window."""
        if self._scales:
            self.value = cfg.initial_loss_scale if isinstance(cfg.loss_scale, str) else float(cfg.loss_scale)

    @property
    def dynamic(self) -> bool:
        """Whether the scale depends on which updates were skipped."""
        return self._dynamic

    def scale(self, loss: Tensor) -> Tensor:
        """Scale a loss. In fp32, because an fp16 loss would overflow at once."""
        return loss.float() * self.value if self._scales else loss

    def facts(self) -> dict[str, Any] | None:
        """State for a checkpoint; None without scaling, so that an fp16 run that resumes from it starts with its own
        scale.
        """
        return {"value": self.value, "made": self._made} if self._scales else None

    def resume(self, facts: LossScaleFacts) -> None:
        """Resume the scale of a checkpoint if it is dynamic; a fixed scale comes from the config."""
        if self._dynamic:
            self.value, self._made = facts.value, facts.made % self._interval

    def end_window(self, *, skipped: bool) -> bool:
        """Adjust the scale after an update. Every rank must pass the same value.

        Args:
            skipped: Whether the update was skipped because a gradient was not finite.

        Returns:
            Whether the scale may have caused the skip and was lowered: it is dynamic and was above 1.
        """
        if not self._dynamic:
            return False
        if skipped:
            can_help = self.value > 1.0
            self.value *= _BACKOFF
            self._made = 0
            return can_help
        self._made += 1
        if self._made == self._interval:
            self._made = 0
            if self.value * _GROWTH <= _LARGEST:
                self.value *= _GROWTH
        return False
