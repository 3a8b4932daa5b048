"""The accumulation window: forward, backward and update of its micro-batches, the same on every engine.

Decides the division by the window, clipping, loss scale, schedule and their order; an adapter does each step on its
engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from unishard.config import Training
from unishard.contract.adapter import Updates
from unishard.contract.results import Step
from unishard.distributed.host_read import HostRead
from unishard.engine.guards.guard import Guards
from unishard.engine.loop.call_order import CallOrder
from unishard.engine.loop.items import Items, LossKind
from unishard.engine.optim.loss_scale import LossScale
from unishard.engine.optim.optimizer_calls import OptimizerCalls
from unishard.engine.optim.schedule import Schedule
from unishard.engine.optim.torch_schedule import TorchSchedule
from unishard.engine.place import Phase
from unishard.errors import ContractError, NonFiniteError
from unishard.failures.compared_call import ComparedCall
from unishard.observe.observer import Observers


class Accumulation:
    """Runs accumulation windows. The methods implement those of `Engine` with the same names."""

    def __init__(
        self,
        training: Training,
        loss_scale: LossScale,
        updates: Updates,
        order: CallOrder,
        schedule: Schedule | TorchSchedule,
        optimizer: OptimizerCalls,
        guards: Guards,
        observers: Observers,
    ) -> None:
        """Begin before the first window.

        Args:
            training: The section.
            loss_scale: What the loss is multiplied by.
            updates: Of the model.
            order: Which calls are allowed, and where the loop is.
            schedule: What sets the learning rates.
            optimizer: What the user holds of the optimizer.
            guards: What finds mistakes that would train wrongly in silence.
            observers: They are told of each window.
        """
        self.observers = observers
        self._guards, self._due = guards, guards.now()
        self._training = training
        self.updates = updates
        self._order, self._place = order, order.place
        self._items = Items()
        self._finished: float | None = None
        """The divisor of the gradients, once they are final in this window."""
        self.norm_before_clipping: Tensor | None = None
        """Of gradients that were clipped before the step."""
        self._schedule = schedule
        self._optimizer = optimizer
        self._loss_scale = loss_scale
        self._pending: Callable[[], float] | None = None
        """The gradient norm of the last update, until it is known whether that was skipped; the schedule assumes that
        it was not."""
        optimizer.public.before_reading = self.resolve_pending
        self.before_update: Callable[[], None] | None = None
        """A check to make once, in the next forward; collective."""
        self.after_update: Callable[[], None] = _nothing
        """Called after each update that was not skipped."""

    @property
    def schedule(self) -> Schedule | TorchSchedule:
        """The schedule, at the coming update."""
        self.resolve_pending()
        return self._schedule

    @property
    def optimizer(self) -> OptimizerCalls:
        """The optimizer, with the rates of the coming update."""
        self.resolve_pending()
        return self._optimizer

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale of the coming micro-batch."""
        self.resolve_pending()
        return self._loss_scale

    def resolve_pending(self) -> None:
        """Learn whether the last update was skipped.

        Waits for its gradient norm, which is long there once the next step ends.
        """
        if self._pending is not None:
            norm, self._pending = self._pending(), None
            skipped = not math.isfinite(norm)
            if skipped:
                self._schedule.retreat()
            self._tell_outcome(skipped=skipped)

    def _tell_outcome(self, *, skipped: bool) -> bool:
        """Of an update; returns whether fp16's loss scale was lowered for it."""
        lowered = self._loss_scale.end_window(skipped=skipped)
        for look in self._guards.all.after_outcome:
            look(skipped=skipped, lowered=lowered)
        return lowered

    def set_boundary(self, last: bool) -> None:
        """Say whether the coming micro-batch ends its window."""
        self._count_without_step()
        self._order.set_boundary(last)

    def _count_without_step(self) -> None:
        """Count a micro-batch that has no step, in a window whose end the caller says: it was not the last."""
        if self._place.pushed and self._place.phase is Phase.BACKWARD_DONE:
            for look in self._guards.all.before_finish:
                look()
            self._order.require("go_on")
            self._place.go_on()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of one micro-batch in training mode."""
        order, place = self._order, self._place
        order.require("forward")
        if place.pushed:
            self._count_without_step()
        self.updates.begin(last=place.last)
        self._due = guards = self._guards.now()
        for look in guards.before_forward:
            look()
        order.ranks.compare(ComparedCall("forward"))
        if self.before_update is not None:
            self.before_update()
            self.before_update = None
        for begins in self.observers.on_forward:
            begins(args, kwargs)
        place.begin_forward()
        try:
            with order.forwarding(), guards.around((args, kwargs)):
                output = self.updates.model.forward(*args, **kwargs)
            for look in guards.after_forward:
                look()
        except BaseException as error:
            self._fail("forward", error)
            raise
        self.updates.watch(output)
        return output

    def backward(self, loss: Tensor, num_items: int | Tensor | None, *, scaled: bool) -> None:
        """Run the backward of one micro-batch."""
        order, place = self._order, self._place
        call = ComparedCall("backward", _detail(num_items, scaled), place.last, num_items, scaled)
        order.require("backward")
        for look in self._due.before_backward:
            look(loss, call)
        order.ranks.compare(call)
        kind = LossKind.SCALED if scaled else LossKind.COUNTED if num_items is not None else LossKind.MEAN
        begins = place.calls == 0
        self._items.add(num_items, kind, begins=begins, last=call.last)
        # The parts of a loss add up, and the scaled losses of a window to one mean: the first stands for all.
        counted = int(begins and not (scaled and place.micro_batch)) if num_items is None else num_items
        for tell in self.observers.on_loss:
            tell(loss, counted)
        if self._loss_scale.dynamic:
            self.resolve_pending()
        known = kind is LossKind.MEAN and place.window > 1 and not place.pushed
        try:
            with order.blocks.inside("backward"), torch.enable_grad():  # the script may be under `no_grad`
                self.updates.backward(self._loss_scale.scale(loss / place.window if known else loss))
        except BaseException as error:
            self._fail("backward", error)
            raise
        for keep in self._due.after_backward:
            keep()
        place.end_backward()

    def _fail(self, part: str, error: BaseException) -> None:
        """After an error in a part of a micro-batch the window can only be discarded."""
        self._place.fail(part)
        for tell in self.observers.on_error:
            tell(error)

    def step(self, clip_grad_norm: float | EllipsisType | None) -> Step:
        """Count the micro-batch; update at the end of the window."""
        call = ComparedCall("step", last=self._place.last)
        self._order.require("step")
        max_norm = self._max_norm(clip_grad_norm)
        self.resolve_pending()
        for look in self._due.before_step:
            look(call)
        if call.last:  # inside a window there is no collective, and the next forward notices a missing step
            if not isinstance(clip_grad_norm, EllipsisType):
                call.detail = f", clip_grad_norm={clip_grad_norm}{call.detail}"
            call.order = self.updates.gradient_order
            self._order.ranks.compare(call)
            call.require_allowed()
        self._place.end_micro_batch()
        if not call.last:
            return Step(updated=False, grad_norm=None, lr=self._schedule.lr, skipped=False)
        step = self._end_window(max_norm)
        for tell in self.observers.on_step:
            tell(step)
        return step

    def _max_norm(self, asked: float | EllipsisType | None) -> float | None:
        if isinstance(asked, EllipsisType):
            return self._training.gradient_clipping
        if asked is not None and not (isinstance(asked, int | float) and asked > 0):
            raise ContractError(f"clip_grad_norm must be a positive number, got {asked!r}; pass None for no clipping")
        return asked

    def discard(self) -> None:
        """Discard the window."""
        place = self._place
        if not (place.inside_window or place.graph or place.failed):
            return
        with self._optimizer.own():
            self.updates.drop_gradients()
        self._items.clear()
        for tell in self.observers.on_discard:
            tell()
        place.discard_window()
        for forget in self._guards.all.forget:
            forget()
        self._finished = self.norm_before_clipping = None

    def close(self) -> None:
        """Give the user's optimizer and scheduler back, and end the logs."""
        for tell in self.observers.on_close:
            tell()
        with suppress(RuntimeError):  # of a device that failed, which the run has raised or is about to
            self.resolve_pending()
        for close in self._guards.all.close:
            close()
        self._optimizer.close()
        self._schedule.close()

    def finish_gradients(self) -> float:
        """Finish the gradients at the end of a window, once. Collective.

        Returns:
            The divisor that the update will use.
        """
        for look in self._guards.all.before_finish:
            look()
        if self._finished is None:
            self.updates.finish_gradients()
            self._finished = self._divisor()
            self._place.finish_gradients()
        return self._finished

    def _divisor(self) -> float:
        return self._items.divisor(undivided=self._place.pushed) * self._loss_scale.value

    def _end_window(self, max_norm: float | None) -> Step:
        lr = self._schedule.lr
        self._optimizer.require_one_schedule(writes=self._schedule.writes)
        try:
            divisor = self._divisor()
        except ContractError:
            self._order.ranks.check_sampled("discard")
            self.discard()  # otherwise the next window would add to this one
            raise
        for tell in self.observers.on_gradients:
            tell(self.finish_gradients)
        before = self.norm_before_clipping
        limit = max_norm if before is None else None
        try:
            with self._order.ranks.awaiting(), self._optimizer.own():
                norm, updated = self.updates.update(limit, divisor, finished=self._finished is not None)
        except BaseException as error:
            for failed in self.observers.on_error:
                failed(error)
            raise
        finally:
            self._place.end_window()
            self._order.ranks.end_window()
            self._items.clear()
            self._finished = self.norm_before_clipping = None
        for look in self._guards.all.after_update:
            look()
        read = norm.get if isinstance(norm, HostRead) else lambda: norm
        step = Step.pending(read if before is None else lambda: before.item(), updated, lr)
        at_once = (  # something cannot take the update back, or raises
            self._training.nonfinite == "raise" or not self._schedule.can_retreat or self.after_update is not _nothing
        )
        if updated is None and not at_once:
            self._pending = norm.get if isinstance(norm, HostRead) else None
            self._optimizer.updated()
            self._schedule.advance()
            return step
        lowered = self._tell_outcome(skipped=step.skipped)
        if step.updated:
            self._optimizer.updated()
            self._schedule.advance()
            self.after_update()
        elif self._training.nonfinite == "raise" and not lowered:
            raise NonFiniteError(
                "a gradient is infinite or NaN on at least one rank; nothing was updated; check this window's batches "
                "and loss, lower optimizer.lr, or set training.nonfinite to skip"
            )
        return step


def _detail(num_items: int | Tensor | None, scaled: bool) -> str:
    """Of a backward: the ranks add up numbers of Python before it, and those in tensors behind it."""
    if scaled:
        return ", scaled"
    if num_items is None:
        return ""
    return ", with num_items in a tensor" if isinstance(num_items, Tensor) else ", with num_items"


def _nothing() -> None:
    """Do nothing."""
