"""The accumulation window: forward, backward and update of its micro-batches, the same on every engine.

Decides the division by the window, clipping, loss scale, schedule and their order; an adapter does each step on its engine.
"""

from __future__ import annotations

import math
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from unishard.config import Config
from unishard.engine.adapter import EngineAdapter
from unishard.engine.loop.call_order import CallOrder, Phase
from unishard.engine.loop.foreign_backward import ForeignBackwardCheck
from unishard.engine.loop.items import Items
from unishard.engine.optim.loss_scale import LossScale
from unishard.engine.optim.schedule import Schedule
from unishard.engine.optim.schedulers import TorchSchedule
from unishard.engine.results import Step
from unishard.errors import ContractError, NonFiniteError

__all__ = ["Accumulation"]


class Accumulation:
    """Runs accumulation windows. The methods implement those of `Engine` with the same names."""

    def __init__(self, cfg: Config, adapter: EngineAdapter, order: CallOrder, schedule: Schedule | TorchSchedule) -> None:
        self._training = cfg.training
        self.adapter = adapter
        self._order = order
        self._items = Items(adapter.device)
        self._foreign = ForeignBackwardCheck(adapter)
        self._finished: float | None = None
        """The divisor of the gradients, once they are final in this window."""
        self.schedule = schedule
        self.loss_scale = LossScale(cfg.precision)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of one micro-batch in training mode."""
        order = self._order
        order.enter("forward")
        if order.before_update is not None:
            order.before_update()
            order.before_update = None
        self.adapter.begin(last=order.last)
        if order.phase is Phase.OPEN:
            order.phase = Phase.FORWARD_DONE
        order.graph = order.graph or torch.is_grad_enabled()
        output = self.adapter.forward(*args, **kwargs)
        self.adapter.watch(output)
        return output

    def backward(self, loss: Tensor, num_items: int | Tensor | None) -> None:
        """Run the backward of one micro-batch."""
        order = self._order
        _require_backward(order, loss)
        order.enter("backward", "" if num_items is None else ", with num_items")
        self._items.add(num_items)
        if order.progress is not None:
            order.progress.record_loss(loss.detach() / (1 if num_items is None else max(1, num_items)))
        divided = loss if order.window == 1 or num_items is not None else loss / order.window
        with self._foreign.own_backward():
            self.adapter.backward(self.loss_scale.scale(divided))
        order.phase, order.graph = Phase.BACKWARD_DONE, False

    def step(self, clip_grad_norm: float | EllipsisType | None) -> Step:
        """Count the micro-batch; update at the end of the window."""
        order = self._order
        if order.phase is not Phase.BACKWARD_DONE:
            raise ContractError("step was called without a backward; call engine.backward(loss) first, once for each micro-batch")
        max_norm = self._training.gradient_clipping if isinstance(clip_grad_norm, EllipsisType) else clip_grad_norm
        if max_norm is not None and not (isinstance(max_norm, int | float) and max_norm > 0):
            raise ContractError(f"clip_grad_norm must be a positive number, got {max_norm!r}; pass None for no clipping")
        if order.last:  # inside a window there is no collective, and the next forward notices a missing step
            order.enter("step", "" if isinstance(clip_grad_norm, EllipsisType) else f", clip_grad_norm={clip_grad_norm}")
        order.phase, order.graph = Phase.OPEN, False
        order.micro_batch += 1
        inside = order.micro_batch < order.window
        step = Step(updated=False, grad_norm=None, lr=self.schedule.lr, skipped=False) if inside else self._end_window(max_norm)
        if order.progress is not None:
            order.progress.record_step(step)
        return step

    def discard(self) -> None:
        """Discard the window."""
        order = self._order
        if not (order.inside_window or order.graph):
            return
        self.adapter.drop_gradients()
        self._items.clear()
        if order.progress is not None:
            order.progress.drop_window()
        order.discard_window()
        self._finished = None

    def finish_gradients(self) -> float:
        """Finish the gradients at the end of a window, once. Collective.

        Returns:
            The divisor that the update will use.
        """
        if self._finished is None:
            self.adapter.finish_gradients()
            self._finished = self._divisor()
        return self._finished

    def _divisor(self) -> float:
        return self._items.divisor() * self.loss_scale.value

    def _end_window(self, max_norm: float | None) -> Step:
        lr = self.schedule.lr
        try:
            divisor = self._divisor()
        except ContractError:
            self._order.enter("discard")
            self.discard()  # otherwise the next window would add to this one
            raise
        try:
            with self._order.awaiting():
                norm, updated = self.adapter.update(max_norm, divisor, finished=self._finished is not None)
        finally:
            self._order.end_window()
            self._items.clear()
            self._finished = None
        lowered = self.loss_scale.end_window(skipped=not updated)
        if updated:
            self.schedule.advance()
        elif self._training.nonfinite == "raise" and not lowered:
            raise NonFiniteError(
                "a gradient is infinite or NaN on at least one rank; nothing was updated; check this window's batches and loss, "
                "lower optimizer.lr, or set training.nonfinite to skip"
            )
        # For NaN gradients, some engines only report that the norm is not finite.
        return Step(updated=updated, grad_norm=norm if math.isfinite(norm) else math.inf, lr=lr, skipped=not updated)


def _require_backward(order: CallOrder, loss: Any) -> None:
    """Raise ContractError unless a backward of this loss is allowed now."""
    if order.phase is Phase.BACKWARD_DONE:
        raise ContractError("backward was called twice for one micro-batch; call engine.step() after every backward")
    if order.phase is Phase.OPEN:
        raise ContractError(
            "backward was called without a forward of the engine; compute the loss with engine(...) in training mode, not engine.module"
        )
    if not isinstance(loss, Tensor):
        raise ContractError(f"backward needs a scalar loss tensor, got {type(loss).__name__}; pass the loss itself, such as output.loss")
    if loss.dim():
        raise ContractError(f"backward needs a scalar loss, got shape {tuple(loss.shape)}; pass its mean, such as loss.mean()")
    if not loss.requires_grad:
        raise ContractError(
            "backward needs a loss with a graph; it was computed in evaluation mode, under no_grad, detached, or from frozen "
            "parameters only"
        )
