"""The contract of a training engine, written once: whatever must be the same on every engine is decided here."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import repeat
from types import EllipsisType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from unishard.backend import Placement, Step
from unishard.config import Config
from unishard.data.batches import Window, warn_of_same_samples, windows
from unishard.data.progress import Progress
from unishard.engine.access import ParameterAccess
from unishard.engine.freezing import Freezing
from unishard.engine.items import Items
from unishard.engine.schedule import Schedule
from unishard.engine.schedulers import TorchSchedule
from unishard.errors import ContractError, NonFiniteError

__all__ = ["TrainingEngine"]


class _Phase(Enum):
    """Where in a micro-batch the loop is."""

    OPEN = "open"
    FORWARD_DONE = "forward done"
    BACKWARD_DONE = "backward done"
    CLOSED = "closed"


class TrainingEngine(ParameterAccess):
    """Implements `unishard.backend.Engine`: division by accumulation, clipping, the schedule, zero_grad and their order.

    A backend subclasses it and supplies the abstract methods, each of which does one thing on its engine. A new engine's
    author may also implement the protocol from nothing.
    """

    def __init__(self, cfg: Config, module: nn.Module, optimizer: Any, device: torch.device) -> None:
        super().__init__(module, device)
        self._cfg = cfg
        self._module = module
        self._optimizer = optimizer
        self._device = device
        self._schedule: Schedule | TorchSchedule = Schedule(cfg.scheduler, optimizer.param_groups)
        self._window = cfg.training.gradient_accumulation_steps
        self._micro_batch = 0
        self._items = Items(device)
        self._phase = _Phase.OPEN
        self._graph = False
        self._discarded = False
        self._progress: Progress | None = None
        self._freezing = Freezing(module)

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

    def _set_trainable(self, names: Sequence[str], trainable: bool) -> None:
        """Freeze parameters or let them train, between two windows. Those without gradient must not move in an update."""
        for name in names:
            self._module.get_parameter(name).requires_grad_(trainable)

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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of one micro-batch. Collective.

        Raises:
            ContractError: The engine is closed.
        """
        self._require_open("forward")
        self._begin_micro_batch(last=self._micro_batch + 1 == self._window)
        if self._phase is _Phase.OPEN:
            self._phase = _Phase.FORWARD_DONE
        self._graph = self._graph or torch.is_grad_enabled()
        return self._forward(*args, **kwargs)

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
        if self._phase is _Phase.BACKWARD_DONE:
            raise ContractError("backward was called twice for one micro-batch; call engine.step() after every backward")
        if self._phase is _Phase.OPEN:
            raise ContractError("backward was called without a forward of the engine; compute the loss from engine(...), not engine.module")
        if not isinstance(loss, Tensor):
            raise ContractError(
                f"backward needs a scalar loss tensor, got {type(loss).__name__}; pass the loss itself, such as output.loss"
            )
        if loss.dim():
            raise ContractError(f"backward needs a scalar loss, got shape {tuple(loss.shape)}; pass its mean, such as loss.mean()")
        if not loss.requires_grad:
            raise ContractError(
                "backward needs a loss with a graph; it was computed under no_grad, detached, or from frozen parameters only"
            )
        self._items.add(num_items)
        if self._progress is not None:
            self._progress.record_loss(loss.detach() / (1 if num_items is None else max(1, num_items)))
        self._backward(loss if self._window == 1 or num_items is not None else loss / self._window)
        self._phase, self._graph = _Phase.BACKWARD_DONE, False

    def step(self, clip_grad_norm: float | EllipsisType | None = ...) -> Step:
        """After every micro-batch. Updates the parameters at the end of an accumulation window, else only counts. Collective.

        Args:
            clip_grad_norm: Largest gradient norm for this update, None for no clipping; left out, `training.gradient_clipping`.

        Returns:
            What was done. `grad_norm` is the norm before clipping, a Python float, the same on every rank and engine.

        Raises:
            ContractError: No backward since the last step, the engine is closed, `clip_grad_norm` is not positive, or the window
                has no items.
            NonFiniteError: On every rank: a gradient is infinite or not a number on one of them, and `training.nonfinite` is
                `raise`. The window is over and nothing was updated.
        """
        self._require_open("step")
        if self._phase is not _Phase.BACKWARD_DONE:
            raise ContractError("step was called without a backward; call engine.backward(loss) first, once for each micro-batch")
        max_norm = self._cfg.training.gradient_clipping if isinstance(clip_grad_norm, EllipsisType) else clip_grad_norm
        if max_norm is not None and not (isinstance(max_norm, int | float) and max_norm > 0):
            raise ContractError(f"clip_grad_norm must be a positive number, got {max_norm!r}; pass None for no clipping")
        self._phase, self._graph = _Phase.OPEN, False
        self._micro_batch += 1
        step = (
            Step(updated=False, grad_norm=None, lr=self.lr, skipped=False)
            if self._micro_batch < self._window
            else self._end_window(max_norm)
        )
        if self._progress is not None:
            self._progress.record_step(step)
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
        if not (self._micro_batch or self._graph or self._phase is _Phase.BACKWARD_DONE):
            return
        self._drop_gradients()
        self._items.clear()
        self._phase, self._graph, self._micro_batch = _Phase.OPEN, False, 0
        self._settled, self._discarded = False, True

    def follow(self, scheduler: LRScheduler) -> None:
        """Let a torch scheduler write the learning rates, once for each real update. `prepare` calls it, before the first step.

        Args:
            scheduler: Of an optimizer whose group dicts are those of `optimizer`.
        """
        self._require_open("follow")
        self._schedule = TorchSchedule(scheduler, self._optimizer.param_groups)

    def set_trainable(self, names: str | Iterable[str], trainable: bool = True) -> None:
        """Freeze parameters, or let them train (again), from the next accumulation window on. Collective.

        What plain torch does when `requires_grad` is toggled and gradients are None: a frozen parameter keeps its value and its
        optimizer state, without decay, and one that has never trained starts with fresh state and a step count of its own.

        Args:
            names: Names of parameters, of modules (all their parameters) or patterns such as `*.lora_A.*`; a tied parameter has
                several names, and each of them means it. Only what was trainable when the model was prepared may train.
            trainable: Whether they train.

        Raises:
            ContractError: Inside a window, a name matches nothing, a parameter was frozen in `prepare`, or none is left to train.
            RankMismatchError: The ranks give different names.
        """
        self._require_open("set_trainable")
        if self._micro_batch or self._phase is _Phase.BACKWARD_DONE:
            raise ContractError("set_trainable was called inside an accumulation window; call it when step().updated or .skipped is true")
        self._set_trainable(self._freezing.choose(names, trainable), trainable)

    def train(self, mode: bool = True) -> Self:
        """Put the model in training mode."""
        self._require_open("train")
        self._module.train(mode)
        return self

    def eval(self) -> Self:
        """Put the model in evaluation mode."""
        return self.train(False)

    def batches(self, loader: Iterable[Any], *, progress: bool = False) -> Iterator[Any]:
        """This rank's batches, moved to the device. Collective: all ranks must iterate.

        Looks one accumulation window ahead, so that the incomplete one at the end is divided by its true length
        (`training.last_window: step`) or left out (`drop`). In evaluation mode there are no windows: every batch is yielded, also
        while the training loop outside is in the middle of one.

        Args:
            loader: Yields this rank's own batches; every rank must yield the same number, as `unishard.dataloader` does.
            progress: Show a progress bar on rank 0 (plain lines without a terminal).

        Raises:
            ContractError: A batch was not followed by backward and step, or an earlier loop stopped inside a window.
            RankMismatchError: The ranks' loaders have different lengths.
        """
        training = self._module.training
        for window in self.windows(loader, progress=progress):
            for batch in window:
                yield batch
                if training and self._discarded:
                    break  # the rest of a window that was dropped

    def windows(self, loader: Iterable[Any], *, lengths: Iterable[int] | None = None, progress: bool = False) -> Iterator[Window]:
        """This rank's batches in accumulation windows, one for each update. Collective: all ranks must iterate.

        Like `batches`, for loops that want to see a whole window before its first forward, or windows of changing length.

        Args:
            loader: Yields this rank's own batches; every rank must yield the same number.
            lengths: Batches in each window, the same on every rank; left out, `training.gradient_accumulation_steps` in each. It
                ends the loop if it ends first.
            progress: Show a progress bar on rank 0 (plain lines without a terminal).

        Yields:
            The batches of one window, each moved to the device when it is taken out.

        Raises:
            ContractError: As `batches`; or a length is not positive.
            RankMismatchError: The ranks' loaders have different lengths.
        """
        self._require_open("batches")
        warn_of_same_samples(loader)
        training, length = self._module.training, self._cfg.training.gradient_accumulation_steps
        drop = training and self._cfg.training.last_window == "drop"
        bar = Progress(loader, length, self._device, drop=drop) if progress and dist.get_rank() == 0 else None
        outer, self._progress = self._progress, bar
        try:
            for window in windows(loader, repeat(length) if lengths is None else lengths, self._device, drop=drop):
                if training:
                    self._begin_window(len(window))
                yield window if bar is None else window.watched_by(bar.record_batch)
            if training:
                self._begin_window(length)
        finally:
            if training and not self._micro_batch:
                self._window = length
            self._progress = outer
            if bar is not None:
                bar.close()

    def mean(self, value: Tensor | float) -> float:
        """Mean of a scalar over the ranks. Collective.

        Args:
            value: A scalar, such as a loss to be logged.
        """
        total = torch.as_tensor(value, dtype=torch.float32, device=self._device).detach().reshape(()).clone()
        dist.all_reduce(total)
        return float(total.item() / dist.get_world_size())

    def close(self) -> None:
        """Release the engine. Calling it twice is fine; using the engine afterwards is an error."""
        if self._phase is not _Phase.CLOSED:
            self._phase = _Phase.CLOSED
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _require_open(self, call: str) -> None:
        if self._phase is _Phase.CLOSED:
            raise ContractError(f"{call} was called on a closed engine; build the model anew and prepare it")

    def _end_window(self, max_norm: float | None) -> Step:
        lr = self.lr
        try:
            norm, updated = self._update(max_norm, self._items.divisor())
        finally:
            self._window, self._micro_batch = self._cfg.training.gradient_accumulation_steps, 0
            self._items.clear()
            self._settled = False
        if updated:
            self._schedule.advance()
        elif self._cfg.training.nonfinite == "raise":
            raise NonFiniteError(
                "a gradient is infinite or not a number on at least one rank; nothing was updated; look at this window's batches and loss, "
                "lower optimizer.lr, or set training.nonfinite to skip"
            )
        # Where a gradient is not a number, some engines can only say that the norm is not finite.
        return Step(updated=updated, grad_norm=norm if math.isfinite(norm) else math.inf, lr=lr, skipped=not updated)

    def _gradient_divisor(self) -> float:
        return self._items.divisor()

    def _begin_window(self, length: int) -> None:
        if self._micro_batch:
            raise ContractError(
                f"a new accumulation window starts after {self._micro_batch} of {self._window} micro-batches of the last one; "
                "call backward and step for every batch, and leave a loop only when step().updated or step().skipped is true"
            )
        self._window, self._discarded = length, False

    def _require_end_of_window(self, call: str) -> None:
        self._require_open(call)
        if self._phase is not _Phase.BACKWARD_DONE or self._micro_batch + 1 < self._window:
            done = self._micro_batch + (self._phase is _Phase.BACKWARD_DONE)
            raise ContractError(
                f"{call} was called after {done} of {self._window} backward calls of the window, where the gradients are not finished; "
                "call it between the last backward of a window and engine.step()"
            )

    def _require_no_graph(self, call: str) -> None:
        self._require_open(call)
        if self._graph:
            raise ContractError(
                f"{call} would change a parameter that a forward has used and its backward still needs; call it after backward, "
                "or drop the forward with engine.discard(); a forward under torch.no_grad() is no hindrance"
            )
