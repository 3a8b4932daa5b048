"""The contract of a training engine, written once: whatever must be the same on every engine is decided here."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import EllipsisType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from unishard.checkpoint.background import Background
from unishard.config import Config
from unishard.data.progress import Progress
from unishard.distributed import collective_check, process_group
from unishard.engine.loop.batching import Feeding
from unishard.engine.loop.call_order import Phase, Phases
from unishard.engine.loop.evaluation import Evaluation
from unishard.engine.loop.frozen import Passing
from unishard.engine.loop.items import Items
from unishard.engine.loop.trainable import Freezing, Trainability
from unishard.engine.optim.loss_scale import LossScale
from unishard.engine.optim.schedule import Schedule
from unishard.engine.optim.schedulers import TorchSchedule
from unishard.engine.state.autosave import Automatic
from unishard.engine.state.save_and_load import Checkpointing
from unishard.errors import ContractError, NonFiniteError
from unishard.plugins.backend import Placement, Step

__all__ = ["TrainingEngine"]


class TrainingEngine(Phases, Trainability, Evaluation, Feeding, Passing, Checkpointing):
    """Implements `unishard.plugins.backend.Engine`: division by accumulation, clipping, the schedule, zero_grad and their order.

    A backend subclasses it and supplies the abstract methods, each of which does one thing on its engine. A new engine's
    author may also implement the protocol from nothing.
    """

    _trains = True

    def __init__(self, cfg: Config, module: nn.Module, optimizer: Any, device: torch.device) -> None:
        super().__init__(module, device)
        self._cfg = cfg
        self._module = module
        self._optimizer = optimizer
        self._device = device
        self._schedule: Schedule | TorchSchedule = Schedule(cfg.scheduler, optimizer.param_groups)
        self._loss_scale = LossScale(cfg.precision)
        self._window = cfg.training.gradient_accumulation_steps
        self._micro_batch = 0
        self._items = Items(device)
        self._phase = Phase.OPEN
        self._graph = False
        self._discarded = False
        self._progress: Progress | None = None
        self._freezing = Freezing(module)
        self._updates = 0
        """Accumulation windows that have ended."""
        self._model_class = type(module).__name__
        self._group_names: list[list[str]] = []
        self._background = Background(ready=cfg.checkpoint.async_save)
        self._automatic = Automatic(cfg.checkpoint, device) if self._trains else None
        self._desync = collective_check.join(cfg.communication)

    # -- what an engine supplies ------------------------------------------------------------------------------------------

    @abstractmethod
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of one micro-batch through the sharded model."""

    @abstractmethod
    def _backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of an already divided loss."""

    @abstractmethod
    def _begin_micro_batch(self, *, last: bool) -> None:
        """Before the forward of a micro-batch: whether it is the last of its window, so that engines can time their collectives."""

    @abstractmethod
    def _update(self, max_norm: float | None, divisor: float) -> tuple[float, bool]:
        """End the window: divide the gradients, clip them to `max_norm` (None: do not), update, and zero the gradients.

        Args:
            max_norm: Of the divided gradients.
            divisor: What the accumulated gradients are divided by, mostly 1.

        Returns:
            The global L2 norm of the divided gradients before clipping (fp32), and whether the update was made. Unless
            `training.nonfinite` is `ignore`, one whose norm is not finite is left out and changes neither parameters nor state.
        """

    @abstractmethod
    def placement(self) -> Placement:
        """What the engine really holds, read off its live tensors."""

    @abstractmethod
    def _release(self) -> None:
        """Let go of the engine's resources."""

    # -- what every engine is ---------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The user's model, sharded in place."""
        return self._module

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._device

    @property
    def optimizer(self) -> Any:
        """The optimizer that steps; its `param_groups` hold the live learning rates."""
        return self._optimizer

    @property
    def lr(self) -> float:
        """Learning rate that the next update will use (first parameter group)."""
        return self._schedule.lr

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward, and the gradients divided by after it; 1.0 but in fp16."""
        return self._loss_scale.value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of one micro-batch; in evaluation mode without a graph, as under `torch.no_grad`. Collective.

        Raises:
            ContractError: The engine is closed, or a `lockstep` block runs in training mode.
        """
        self._require_open("forward")
        if self._is_frozen:
            self._enter("forward", ", frozen")
            return self._forward_frozen(*args, **kwargs)
        if not self._module.training:
            return self._evaluate("forward", args, kwargs)
        if self._turns is not None:
            raise ContractError("the model was put in training mode inside engine.lockstep(); do that after the block")
        self._enter("forward")
        self._begin_micro_batch(last=self._micro_batch + 1 == self._window)
        if self._phase is Phase.OPEN:
            self._phase = Phase.FORWARD_DONE
        self._graph = self._graph or torch.is_grad_enabled()
        output = self._forward(*args, **kwargs)
        self._watch(output)
        return output

    def backward(self, loss: Tensor, num_items: int | Tensor | None = None) -> None:
        """Backward of one micro-batch. Collective.

        Args:
            loss: Scalar. Without `num_items` the mean loss of this micro-batch, which the engine divides by the length of the
                accumulation window. With it the sum of the losses of this micro-batch's items.
            num_items: How many items (tokens, samples) `loss` sums over on this rank, 0 or more. The update then uses the gradient
                of the mean over all items of the window and of all ranks, however unevenly they are spread. Pass it for every
                micro-batch of a window and on every rank, or not at all.

        Raises:
            ContractError: `loss` is no scalar tensor with a graph, the engine is closed, it has not been called since the last
                step (gradients of `engine.module(...)` would not be reduced), `step` has not been called since the last
                backward, or `num_items` is no count or is missing for a part of the window.
        """
        self._require_open("backward")
        if self._phase is Phase.BACKWARD_DONE:
            raise ContractError("backward was called twice for one micro-batch; call engine.step() after every backward")
        if self._phase is Phase.OPEN:
            raise ContractError(
                "backward was called without a forward of the engine; compute the loss from engine(...) in training mode, not engine.module"
            )
        if not isinstance(loss, Tensor):
            raise ContractError(
                f"backward needs a scalar loss tensor, got {type(loss).__name__}; pass the loss itself, such as output.loss"
            )
        if loss.dim():
            raise ContractError(f"backward needs a scalar loss, got shape {tuple(loss.shape)}; pass its mean, such as loss.mean()")
        if not loss.requires_grad:
            raise ContractError(
                "backward needs a loss with a graph; it was computed in evaluation mode, under no_grad, detached, or from frozen "
                "parameters only"
            )
        self._enter("backward", "" if num_items is None else ", with num_items")
        self._items.add(num_items)
        if self._progress is not None:
            self._progress.record_loss(loss.detach() / (1 if num_items is None else max(1, num_items)))
        self._in_backward = True
        try:
            self._backward(self._loss_scale.scale(loss if self._window == 1 or num_items is not None else loss / self._window))
        finally:
            self._in_backward = False
        self._phase, self._graph = Phase.BACKWARD_DONE, False

    def step(self, clip_grad_norm: float | EllipsisType | None = ...) -> Step:
        """After every micro-batch. Updates the parameters at the end of an accumulation window, else only counts. Collective.

        Args:
            clip_grad_norm: Largest gradient norm for this update, None for no clipping; left out, `training.gradient_clipping`.

        Returns:
            What was done. `grad_norm` is the norm before clipping, a Python float, the same on every rank and engine.

        Raises:
            ContractError: No backward since the last step, the engine is closed, `clip_grad_norm` is not positive, or the window
                has no items.
            NonFiniteError: On every rank: a gradient is infinite or not a number on one of them, `training.nonfinite` is `raise`,
                and a lower loss scale cannot help. The window is over and nothing was updated.
            CheckpointError: On every rank: a save that the config asks for failed, after the update.
            SystemExit: On every rank, with code 85: a signal of `checkpoint.on_signal` came, and the run is saved.
        """
        self._require_open("step")
        if self._phase is not Phase.BACKWARD_DONE:
            raise ContractError("step was called without a backward; call engine.backward(loss) first, once for each micro-batch")
        max_norm = self._cfg.training.gradient_clipping if isinstance(clip_grad_norm, EllipsisType) else clip_grad_norm
        if max_norm is not None and not (isinstance(max_norm, int | float) and max_norm > 0):
            raise ContractError(f"clip_grad_norm must be a positive number, got {max_norm!r}; pass None for no clipping")
        if self._micro_batch + 1 == self._window:  # inside a window nothing is sent, and the next forward notices a missing step
            self._enter("step", "" if isinstance(clip_grad_norm, EllipsisType) else f", clip_grad_norm={clip_grad_norm}")
        self._phase, self._graph = Phase.OPEN, False
        self._micro_batch += 1
        step = (
            Step(updated=False, grad_norm=None, lr=self.lr, skipped=False)
            if self._micro_batch < self._window
            else self._end_window(max_norm)
        )
        if self._progress is not None:
            self._progress.record_step(step)
        if not self._micro_batch:
            self._save_if_due()
        return step

    def discard(self) -> None:
        """Drop the accumulation window: its gradients are forgotten as if its backward calls had not been. Collective.

        Nothing is updated and the schedule stays. The next backward begins a new window, and a loop over `batches` goes on with
        the first batch of the next one. Works at any point of a window, also after a forward without a backward; where nothing
        is pending it does nothing.

        Raises:
            ContractError: The engine is closed.
        """
        self._require_open("discard")
        self._enter("discard")
        if not (self._micro_batch or self._graph or self._phase is Phase.BACKWARD_DONE):
            return
        self._drop_gradients()
        self._items.clear()
        if self._progress is not None:
            self._progress.drop_window()
        self._phase, self._graph, self._micro_batch = Phase.OPEN, False, 0
        self._settled, self._discarded = False, True

    def follow(self, scheduler: LRScheduler) -> None:
        """Let a torch scheduler write the learning rates, once for each real update. `prepare` calls it, before the first step.

        Args:
            scheduler: Of an optimizer whose group dicts are those of `optimizer`.
        """
        self._require_open("follow")
        self._schedule = TorchSchedule(scheduler, self._optimizer.param_groups)

    def identify(self, model: str, groups: Sequence[Sequence[str]]) -> None:
        """Say what sharding hides, for checkpoints. `prepare` calls it.

        Args:
            model: Class of the model.
            groups: Names of the parameters in each group of `optimizer`.
        """
        self._model_class = model
        self._group_names = [list(group) for group in groups]

    def train(self, mode: bool = True) -> Self:
        """Put the model in training mode."""
        self._require_open("train")
        self._module.train(mode)
        return self

    def eval(self) -> Self:
        """Put the model in evaluation mode."""
        return self.train(False)

    def mean(self, value: Tensor | float) -> float:
        """Mean of a scalar over the ranks. Collective.

        Args:
            value: A scalar, such as a loss to be logged.
        """
        self._require_open("mean")
        self._enter("mean")
        total = torch.as_tensor(value, dtype=torch.float32, device=self._device).detach().reshape(()).clone()
        with self._awaiting():
            dist.all_reduce(total)
            return float(total.item() / dist.get_world_size())

    def close(self) -> None:
        """Release the engine. Calling it twice is fine; using the engine afterwards is an error."""
        self._close(None)

    def _close(self, why: BaseException | None) -> None:
        if self._phase is not Phase.CLOSED:
            self._phase = Phase.CLOSED
            process_group.ended_by(why)
            if self._desync is not None:
                self._desync.leave(why)
            self._stop_saving()
            try:
                self._background.close()
            finally:
                self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close(next((error for error in exc if isinstance(error, BaseException)), None))

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _end_window(self, max_norm: float | None) -> Step:
        lr = self.lr
        try:
            divisor = self._gradient_divisor()
        except ContractError:
            self.discard()  # else the next window would add to this one
            raise
        try:
            with self._awaiting():
                norm, updated = self._update(max_norm, divisor)
        finally:
            self._window, self._micro_batch = self._cfg.training.gradient_accumulation_steps, 0
            self._items.clear()
            self._settled = False
            self._updates += 1
        lowered = self._loss_scale.end_window(skipped=not updated)
        if updated:
            self._schedule.advance()
        elif self._cfg.training.nonfinite == "raise" and not lowered:
            raise NonFiniteError(
                "a gradient is infinite or not a number on at least one rank; nothing was updated; look at this window's batches and loss, "
                "lower optimizer.lr, or set training.nonfinite to skip"
            )
        # Where a gradient is not a number, some engines can only say that the norm is not finite.
        return Step(updated=updated, grad_norm=norm if math.isfinite(norm) else math.inf, lr=lr, skipped=not updated)

    def _awaiting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._desync is None else self._desync.reading(self._device)

    def _gradient_divisor(self) -> float:
        return self._items.divisor() * self._loss_scale.value
