"""Warn of a loss that the user has divided by the accumulation steps, which the engine does too."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

__all__ = ["warn_if_divided"]

_logger = logging.getLogger("unishard")


def warn_if_divided(loss: Tensor, steps: int) -> None:
    """Log a warning if the last operation of a loss divides it by `steps`. May wait for the device.

    Args:
        loss: With a graph.
        steps: `training.gradient_accumulation_steps`, more than 1.
    """
    node: Any = loss.grad_fn
    kind = "" if node is None else node.name()
    other = getattr(node, "_saved_other", None) if kind in ("DivBackward0", "MulBackward0") else None
    if not isinstance(other, Tensor | int | float) or (isinstance(other, Tensor) and other.numel() != 1):
        return
    factor = float(other)
    divisor = factor if kind == "DivBackward0" else 1 / factor if factor else 0.0
    if abs(divisor - steps) <= 1e-6 * steps:
        _logger.warning(
            "the loss that was passed to engine.backward ends in a division by %d, which is training.gradient_accumulation_steps; "
            "engine.backward divides by the accumulation window itself: pass the undivided loss, or the gradients are %d times too small "
            "(ignore this if the division has another purpose)",
            steps,
            steps,
        )
