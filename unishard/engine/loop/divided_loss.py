"""Warn of a loss that the user has divided by the accumulation steps or the number of items, which the engine does
too.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

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
            "the loss that was passed to engine.backward ends in a division by %d, which is "
            "training.gradient_accumulation_steps; engine.backward divides by the accumulation window itself: pass the "
            "undivided loss, or the gradients are %d times too small (ignore this if the division has another purpose)",
            steps,
            steps,
        )


_MEAN = 1
"""`reduction="mean"` in the graph of torch's losses (torch 2.13, aten/src/ATen/core/Reduction.h)."""
_SAME_VALUE = ("ViewBackward0", "ToCopyBackward0", "SqueezeBackward0", "AliasBackward0", "CloneBackward0")


def warn_if_mean(loss: Tensor) -> None:
    """Log a warning if a loss that is passed with `num_items` ends in a mean. Does not wait for the device.

    Args:
        loss: With a graph.
    """
    node: Any = loss.grad_fn
    # An engine's own functions around an output have one input, and return its value.
    while node is not None and (
        node.name() in _SAME_VALUE or isinstance(node, torch.autograd.function.BackwardCFunction)
    ):
        inputs = [each for each, _ in node.next_functions if each is not None]
        node = inputs[0] if len(inputs) == 1 else None
    kind = "" if node is None else node.name()
    if kind.startswith("MeanBackward") or ("Loss" in kind and getattr(node, "_saved_reduction", None) == _MEAN):
        _logger.warning(
            "the loss that was passed to engine.backward with num_items ends in a mean (%s), and the engine divides it "
            "by the number of items again; pass the sum of the losses of the items, as with reduction='sum', or leave "
            "num_items out (ignore this if the mean has another purpose)",
            kind,
        )
