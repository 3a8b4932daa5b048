"""The accumulation window: forward, backward and update of its micro-batches, the same on every engine.

Decides the division by the window, clipping, loss scale, schedule and their order; an adapter does each step on its
engine.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import EllipsisType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.config import Training
from unishard.config.hints import instead
from unishard.contract.adapter import EngineAdapter
from unishard.contract.results import Step
from unishard.distributed.host_read import HostRead
from unishard.engine.loop import script_checks
from unishard.engine.loop.call_order import CallOrder, Phase
from unishard.engine.loop.equal_values import EqualValues
from unishard.engine.loop.forward_guard import ForwardGuard
from unishard.engine.loop.items import Items, LossKind
from unishard.engine.loop.reached_parameters import ReachedParameters, Trainable
from unishard.engine.loop.training_passes import OutsideBatches
from unishard.engine.loop.written_parameters import WrittenParameters
from unishard.engine.optim.loss_scale import LossScale
from unishard.engine.optim.optimizer_calls import OptimizerCalls
from unishard.engine.optim.schedule import Schedule
from unishard.engine.optim.torch_schedule import TorchSchedule
from unishard.errors import ContractError, NonFiniteError
from unishard.observe.observer import Observers

_logger = logging.getLogger("unishard")


class Accumulation:
    """Runs accumulation windows. The methods implement those of `Engine` with the same names."""

    def __init__(
        self,
        training: Training,
        loss_scale: LossScale,
        adapter: EngineAdapter,
        order: CallOrder,
        schedule: Schedule | TorchSchedule,
        optimizer: OptimizerCalls,
        trainable: Trainable,
        classes: Mapping[str, str],
        outside: OutsideBatches,
        observers: Observers,
        *,
        written: WrittenParameters | None,
        held: EqualValues | None,
        watches: Sequence[ForwardGuard],
        added: script_checks.AddedModules,
    ) -> None:
        """Begin before the first window.

        Args:
            training: The section.
            loss_scale: What the loss is multiplied by.
            adapter: The model.
            order: The position in the loop.
            schedule: What sets the learning rates.
            optimizer: What the user holds of the optimizer.
            trainable: Which parameters train.
            classes: The class of each module by name, before it was sharded.
            outside: What looks for batches that no loop has read.
            observers: They are told of each window.
            written: What finds writes of parameters past the engine; None where the module's own tensors are the
                weights.
            held: What describes what must be the same on all ranks in an update; None on a single rank.
            watches: What looks at some forwards.
            added: What finds modules, parameters and hooks that the script adds.
        """
        self.observers = observers
        self._written, self._held, self._watches = written, held, watches
        self._training = training
        self._trainable = trainable
        self.adapter = adapter
        self._order = order
        self._items = Items()
        self._foreign = script_checks.ForeignBackwardCheck(adapter)
        self._edited = script_checks.EditedGradients(adapter.module, order)
        self._reached = ReachedParameters(adapter, order, classes)
        self._added = added
        self._outside = outside
        self._looks_for_scale = self._looks_for_mean = self._looks_for_end = dist.get_rank() == 0
        self._skipped = script_checks.SkippedUpdates()
        self._failed = ""
        """What has raised an error in this window: the forward or the backward."""
        self._finished: float | None = None
        """The divisor of the gradients, once they are final in this window."""
        self._schedule = schedule
        self._optimizer = optimizer
        self._loss_scale = loss_scale
        self._pending: Callable[[], float] | None = None
        """The gradient norm of the last update, until it is known whether that was skipped; the schedule assumes that
        it was not."""
        optimizer.public.before_reading = self.resolve_pending
        self.after_update: Callable[[], None] = _nothing
        """Called after each update that was not skipped."""

    # -- what depends on the last update -----------------------------------------------------------

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
    def shown(self) -> dict[nn.Parameter, tuple[Tensor | None, int]]:
        """The gradients of this window that the script has read, see `EditedGradients`."""
        return self._edited.shown

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
            lowered = self._loss_scale.end_window(skipped=skipped)
            if skipped or self._skipped.streak:
                self._skipped.add(skipped=skipped, lowered=lowered)

    # -- one micro-batch ---------------------------------------------------------------------------

    def set_boundary(self, last: bool) -> None:
        """Say whether the coming micro-batch ends its window."""
        self._go_on()
        self._order.set_boundary(last)

    def _go_on(self) -> None:
        """Count a micro-batch that has no step, in a window whose end the caller says: it was not the last.

        Raises:
            ContractError: The gradients of the window were read, and so finished.
        """
        if not (self._order.pushed and self._order.phase is Phase.BACKWARD_DONE):
            return
        if self._finished is not None:
            raise ContractError(
                "a window goes on after its gradients, or their norm, were read; read them only before the step of its "
                "last micro-batch"
            )
        self._edited.compare()
        self._order.go_on()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of one micro-batch in training mode."""
        order = self._order
        if self._failed:
            raise ContractError(
                f"forward was called after an error in the {self._failed} of the last micro-batch, of which gathered "
                "weights or gradients may be left; where you catch such an error, call engine.discard() to drop the "
                "window, on every rank"
            )
        if order.averaged:
            raise ContractError(
                "forward was called in training mode inside average.weights(); call engine.eval() first, or train "
                "after the block"
            )
        self._go_on()
        self.adapter.begin(last=order.last)
        looks = order.looks
        if looks:
            self._added.refuse(gathered=order.gathered)
        if self._written is not None:
            self._written.before_forward()
        if self._held is not None and not order.micro_batch:
            self._held.look()
        order.check_sampled("forward")
        if order.looks_at_update and not order.micro_batch:
            self._outside.forward((args, kwargs))
        if order.before_update is not None:
            order.before_update()
            order.before_update = None
        self.observers.on_forward(args, kwargs)
        if order.phase is Phase.OPEN:
            order.phase = Phase.FORWARD_DONE
        order.graph = order.graph or torch.is_grad_enabled()
        try:
            with order.forwarding(), self._watching() if looks else nullcontext():
                output = self.adapter.forward(*args, **kwargs)
            if self._written is not None:
                self._written.after_forward()
        except BaseException as error:
            self._failed = "forward"
            self.observers.on_error(error)
            raise
        self.adapter.watch(output)
        return output

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """A block in which a forward writes nothing that the engine would lose."""
        with ExitStack() as stack:
            for watch in self._watches:
                stack.enter_context(watch.forward())
            yield

    def backward(self, loss: Tensor, num_items: int | Tensor | None, *, scaled: bool) -> None:
        """Run the backward of one micro-batch."""
        order = self._order
        order.require_backward(loss, training=self.adapter.module.training)
        if order.looks:
            self._trainable.require_frozen()
        order.check_sampled(
            "backward",
            ", scaled" if scaled else _DETAILS[num_items is None, isinstance(num_items, Tensor)],
            skipped=self._reached.before_backward(loss),
        )
        kind = LossKind.SCALED if scaled else LossKind.COUNTED if num_items is not None else LossKind.MEAN
        self._items.add(num_items, kind, last=order.last)
        # The scaled losses of a window add up to one mean.
        self.observers.on_loss(loss, int(not order.micro_batch) if scaled else num_items)
        if self._looks_for_scale and kind is LossKind.MEAN:
            self._looks_for_scale = False
            script_checks.warn_if_scaled(loss, self._training.gradient_accumulation_steps)
        if self._looks_for_mean and num_items is not None:
            self._looks_for_mean = False
            script_checks.warn_if_mean(loss)
        self._edited.compare()
        known = kind is LossKind.MEAN and order.window > 1 and not order.pushed
        if self._loss_scale.dynamic:
            self.resolve_pending()
        try:
            with self._foreign.own_backward(), torch.enable_grad():  # the script may be under `no_grad`
                self.adapter.backward(self._loss_scale.scale(loss / order.window if known else loss))
        except BaseException as error:
            self._failed = "backward"
            self.observers.on_error(error)
            raise
        self._edited.keep()
        order.phase, order.graph = Phase.BACKWARD_DONE, False

    def step(self, clip_grad_norm: float | EllipsisType | None) -> Step:
        """Count the micro-batch; update at the end of the window."""
        order = self._order
        order.require_sharded("step")
        if order.phase is not Phase.BACKWARD_DONE:
            raise ContractError(
                "step was called without a backward; call engine.backward(loss) first, once for each micro-batch"
            )
        max_norm = self._training.gradient_clipping if isinstance(clip_grad_norm, EllipsisType) else clip_grad_norm
        if max_norm is not None and not (isinstance(max_norm, int | float) and max_norm > 0):
            raise ContractError(
                f"clip_grad_norm must be a positive number, got {max_norm!r}; {instead('clip_grad_norm', max_norm)}"
            )
        self.resolve_pending()
        self._edited.compare()
        if order.last:  # inside a window there is no collective, and the next forward notices a missing step
            clip = "" if isinstance(clip_grad_norm, EllipsisType) else f", clip_grad_norm={clip_grad_norm}"
            edited = ", with gradients that were changed since backward" if self._edited.found else ""
            held = "" if self._held is None else self._held.text(self.adapter.optimizer.param_groups)
            order.check_sampled(
                "step",
                clip + edited,
                skipped=self._reached.after_backward(),
                order=self.adapter.gradient_order,
                held=held,
            )
            if self._edited.found:
                self._edited.refuse()
        if not order.end_micro_batch():
            return Step(updated=False, grad_norm=None, lr=self._schedule.lr, skipped=False)
        step = self._end_window(max_norm)
        self.observers.on_step(step)
        return step

    def discard(self) -> None:
        """Discard the window."""
        order = self._order
        if not (order.inside_window or order.graph or self._failed):
            return
        self._failed = ""
        with self._optimizer.own():
            self.adapter.drop_gradients()
        self._items.clear()
        self.observers.on_discard()
        order.discard_window()
        self._edited.clear()
        self._reached.forget()
        self._finished = None

    def close(self) -> None:
        """Give the user's optimizer and scheduler back, and end the logs."""
        self.observers.on_close()
        with suppress(RuntimeError):  # of a device that failed, which the run has raised or is about to
            self.resolve_pending()
        self._reached.close()
        for watch in self._watches:
            watch.close()
        self._optimizer.close()
        self._schedule.close()

    def finish_gradients(self) -> float:
        """Finish the gradients at the end of a window, once. Collective.

        Returns:
            The divisor that the update will use.
        """
        self._edited.compare()
        if self._finished is None:
            self.adapter.finish_gradients()
            self._finished = self._divisor()
        return self._finished

    def _divisor(self) -> float:
        return self._items.divisor(undivided=self._order.pushed) * self._loss_scale.value

    def _end_window(self, max_norm: float | None) -> Step:
        lr = self._schedule.lr
        if lr == 0.0 and self._looks_for_end and self._schedule.ended:
            self._looks_for_end = False
            _logger.warning(
                "update %d has a learning rate of 0 and trains nothing: scheduler.total_steps is reached; end the loop "
                "there, or raise scheduler.total_steps, or set scheduler.min_lr_ratio",
                self._order.updates + 1,
            )
        self._optimizer.require_one_schedule(writes=self._schedule.writes)
        try:
            divisor = self._divisor()
        except ContractError:
            self._order.check_sampled("discard")
            self.discard()  # otherwise the next window would add to this one
            raise
        self.observers.on_gradients(self.finish_gradients)
        try:
            with self._order.awaiting(), self._optimizer.own():
                norm, updated = self.adapter.update(max_norm, divisor, finished=self._finished is not None)
        except BaseException as error:
            self.observers.on_error(error)
            raise
        finally:
            self._order.end_window()
            self._items.clear()
            self._finished = None
        if self._written is not None:
            self._written.keep()
        step = Step.pending(norm.get if isinstance(norm, HostRead) else lambda: norm, updated, lr)
        at_once = (  # something cannot take the update back, or raises
            self._training.nonfinite == "raise" or not self._schedule.can_retreat or self.after_update is not _nothing
        )
        if updated is None and not at_once:
            self._pending = norm.get if isinstance(norm, HostRead) else None
            self._optimizer.updated()
            self._schedule.advance()
            return step
        lowered = self._loss_scale.end_window(skipped=step.skipped)
        if step.skipped or self._skipped.streak:
            self._skipped.add(skipped=step.skipped, lowered=lowered)
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


_DETAILS = {(True, False): "", (False, False): ", with num_items", (False, True): ", with num_items in a tensor"}
"""Of a backward: the ranks add up numbers of Python before it, and those in tensors behind it."""


def _nothing() -> None:
    """Do nothing."""
