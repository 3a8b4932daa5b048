"""Warn of a loss that the script has divided by the accumulation steps or the number of items, or multiplied by a loss
scale, which the engine does too.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.engine.guards.guard import Guard, Looks
from unishard.failures.compared_call import ComparedCall

_logger = logging.getLogger("unishard")

_LOSS_SCALE = 256
"""The least power of two that is taken for the scale of torch's GradScaler, which begins at 65536."""
_MEAN = 1
"""`reduction="mean"` in the graph of torch's losses (torch 2.13, aten/src/ATen/core/Reduction.h)."""
_SAME_VALUE = ("ViewBackward0", "ToCopyBackward0", "SqueezeBackward0", "AliasBackward0", "CloneBackward0")


class DividedLoss(Guard):
    """Looks at the last operation of the first mean loss, and of the first one with `num_items`, on rank 0.

    Without it: gradients are too small, or too large, by a factor that no figure of the run shows.
    """

    looks = Looks.AT_UPDATES

    def __init__(self, steps: int, parts: int) -> None:
        """Look at the first losses.

        Args:
            steps: `training.gradient_accumulation_steps`.
            parts: `training.backward_calls`, by which the parts of a loss may well be divided.
        """
        self._steps = 1 if steps == parts else steps
        self._looks_for_factor = self._looks_for_mean = dist.get_rank() == 0

    def before_backward(self, loss: Tensor, call: ComparedCall) -> None:
        """Warn of a factor in a mean loss, and of a mean that is passed with `num_items`. May wait for the device."""
        if self._looks_for_factor and call.num_items is None and not call.scaled:
            self._looks_for_factor = False
            _warn_if_scaled(loss, self._steps)
        if self._looks_for_mean and call.num_items is not None:
            self._looks_for_mean = False
            _warn_if_mean(loss)


def _warn_if_scaled(loss: Tensor, steps: int) -> None:
    node: Any = loss.grad_fn
    kind = "" if node is None else node.name()
    operand = getattr(node, "_saved_other", None) if kind in ("DivBackward0", "MulBackward0") else None
    if not isinstance(operand, Tensor | int | float) or (isinstance(operand, Tensor) and operand.numel() != 1):
        return
    factor = float(operand)
    divisor = factor if kind == "DivBackward0" else 1 / factor if factor else 0.0
    if kind == "MulBackward0" and factor >= _LOSS_SCALE and math.frexp(factor)[0] == 0.5:
        _logger.warning(
            "the loss that was passed to engine.backward ends in a multiplication by %d, as by GradScaler.scale; no "
            "engine divides the gradients by it, and their norm and clipping are wrong: remove the scaler, as "
            "precision: fp16 in the config scales the loss (ignore this if the multiplication has another purpose)",
            factor,
        )
    if steps > 1 and abs(divisor - steps) <= 1e-6 * steps:
        _logger.warning(
            "the loss that was passed to engine.backward ends in a division by %d, which is "
            "training.gradient_accumulation_steps; engine.backward divides by the accumulation window itself: pass the "
            "undivided loss, or the gradients are %d times too small (ignore this if the division has another purpose)",
            steps,
            steps,
        )


def _warn_if_mean(loss: Tensor) -> None:
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
