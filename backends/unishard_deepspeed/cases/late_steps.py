"""Optimizers that update all parameters in the last of several calls of `step`, as those that step whole tensors."""

from __future__ import annotations

from typing import final

from unishard_deepspeed.cases.case import ZeroCase
from unishard_deepspeed.private.zero_optimizer import ZeroOptimizer


@final
class LateSteps(ZeroCase):
    """DeepSpeed takes a group for updated after each call, and copies its master weights then."""

    def __init__(self, zero: ZeroOptimizer) -> None:
        self._zero = zero

    def updated(self) -> None:
        """Copy all master weights."""
        self._zero.copy_masters()
