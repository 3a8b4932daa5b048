"""Where a training loop is."""

from __future__ import annotations

import math
from enum import Enum

import torch
from torch import nn

from unishard.config import Training
from unishard.engine.sampling import Sampling


class Phase(Enum):
    """The state of a micro-batch."""

    OPEN = "open"
    FORWARD_DONE = "forward done"
    BACKWARD_DONE = "backward done"
    CLOSED = "closed"


class LoopPlace:
    """The window, the micro-batch and its phase. Others read it, and move it by its methods."""

    def __init__(self, module: nn.Module, training: Training) -> None:
        """Start before the first call.

        Args:
            module: The model.
            training: The section. Its seed chooses the micro-batches that the guards look at.
        """
        self._module = module
        self._sampling = Sampling(training.seed)
        self.looks_at_update = True
        """Whether the guards look at some micro-batch of the current update with what costs time, see `Sampling`."""
        self.phase = Phase.OPEN
        self.closed = False
        self.failed = ""
        """What has raised an error in this window: the forward or the backward."""
        self.gradients_read = False
        """Whether the gradients of this window are final."""
        self.micro_batch = 0
        """Micro-batches of the current window that are done."""
        self.backward_calls, self.calls = training.backward_calls, 0
        """Calls of `backward` for each micro-batch, and those for the current one."""
        self.pushed = False
        """Whether the caller says where the current window ends, see `set_boundary`."""
        self.updates = 0
        """Accumulation windows that have ended."""
        self._training = training
        self.full_window = self.window = training.accumulation_at(0)
        """Micro-batches in a full window of the coming update, and in the current window."""
        self._said = False
        """Whether a loop says how long that is."""
        self.writes = 0
        """How often the engine itself has written weights other than by an update."""
        self.gathered = False
        """Whether a module has run or weights were unsharded, with which engines replace parameters or their data by
        other tensors."""
        self.graph = False
        """Whether a forward has built a graph that no backward has used."""
        self.discarded = False
        """Whether the window was discarded."""

    def __str__(self) -> str:
        """In errors."""
        if self._module.training:
            return f"update {self.updates + 1}, micro-batch {self.micro_batch + 1} of {self.window}"
        return f"evaluation, after update {self.updates}"

    # -- what others ask ---------------------------------------------------------------------------

    def full_windows(self, batches: int) -> tuple[int, int]:
        """How many full windows so many batches give from the coming update on, and the batches in them."""
        windows = used = 0
        for end in [*(first for first, _ in self._training.batch_ramp or ()), math.inf]:
            length = self._training.accumulation_at(self.updates + windows)
            more = int(min((batches - used) // length, max(0, end - self.updates - windows)))
            windows, used = windows + more, used + more * length
        return windows, used

    @property
    def begins_window(self) -> bool:
        """Whether the next forward is the first of its window."""
        return self.phase is Phase.OPEN and not (self.micro_batch or self.calls)

    @property
    def last(self) -> bool:
        """Whether the window ends with the coming backward, or with the one that ran."""
        return self.micro_batch + 1 == self.window and self.calls + 1 >= self.backward_calls

    @property
    def looks(self) -> bool:
        """Whether the guards look at the current micro-batch."""
        return self._sampling.all or self._sampling.chosen == self.micro_batch

    @property
    def inside_window(self) -> bool:
        """Whether a window has begun and not ended."""
        return bool(self.micro_batch or self.calls)

    @property
    def backward_missing(self) -> bool:
        """Whether the current micro-batch has had some of its calls of `backward`, but not all."""
        return 0 < self.calls < self.backward_calls

    @property
    def forward_missing(self) -> bool:
        """Whether the next part of a loss has had no forward."""
        return self.phase is Phase.OPEN and 0 < self.calls < self.backward_calls

    @property
    def only_evaluated(self) -> bool:
        """Whether the micro-batch can have had a forward in evaluation mode only."""
        return self.phase is Phase.OPEN and not self._module.training

    @property
    def length_known(self) -> bool:
        """Whether a window has begun whose length is known."""
        return bool(self.micro_batch) and not self.pushed

    @property
    def ramps(self) -> bool:
        """Whether the config says how the windows grow."""
        return self._training.batch_ramp is not None

    @property
    def gradients_not_final(self) -> bool:
        """Whether the last backward of a window has not run, or its step has."""
        return self.phase is not Phase.BACKWARD_DONE or not self.last

    @property
    def holds_gradients(self) -> bool:
        """Whether there are gradients that a call such as `zero_grad()` would drop."""
        return not self.closed and self.inside_window

    # -- what moves it -----------------------------------------------------------------------------

    def begin_window(self, length: int) -> None:
        """Begin a new window, once the last one has ended."""
        self.window, self.discarded, self.pushed, self._said = length, False, False, True

    def leave_loop(self, window: int | None) -> None:
        """Go back to the windows of the loop around it, or to those by hand."""
        if not self.micro_batch:
            self.window, self._said = window or self.full_window, window is not None

    def count_as_discarded(self, discarded: bool) -> None:
        """Say whether the window before the loop was discarded, after a loop that has made no update."""
        self.discarded = discarded

    def set_boundary(self, last: bool) -> None:
        """Say whether the coming micro-batch ends its window."""
        self.pushed, self.window = True, self.micro_batch + (1 if last else 2)

    def begin_forward(self) -> None:
        """A forward in training mode begins."""
        if self.phase is Phase.OPEN:
            self.phase = Phase.FORWARD_DONE
        self.graph = self.graph or torch.is_grad_enabled()

    def end_backward(self) -> None:
        """Count a call of `backward`."""
        self.calls += 1
        self.phase = Phase.BACKWARD_DONE if self.calls == self.backward_calls else Phase.OPEN
        self.graph = False

    def fail(self, part: str) -> None:
        """A forward or a backward has failed."""
        self.failed = part

    def finish_gradients(self) -> None:
        """The gradients of the window are final."""
        self.gradients_read = True

    def end_micro_batch(self) -> None:
        """Count a micro-batch."""
        if self.pushed and not self.last:
            self.window += 1  # until the caller says where it ends
        self.phase, self.graph, self.calls = Phase.OPEN, False, 0
        self.micro_batch += 1

    def go_on(self) -> None:
        """Count a micro-batch that has no step; whether the next one ends the window is as for it."""
        ends = self.last
        self.window = self.micro_batch + 2
        self.end_micro_batch()
        self.window = self.micro_batch + (1 if ends else 2)

    def end_window(self) -> None:
        """End the window after its update was made or skipped."""
        self.micro_batch, self.pushed, self.gradients_read, self._said = 0, False, False, False
        self.resume(self.updates + 1)
        self.looks_at_update = self._sampling.next_update(self.window)

    def discard_window(self) -> None:
        """Discard the window after its gradients were dropped."""
        self.phase, self.graph, self.gradients_read, self.failed = Phase.OPEN, False, False, ""
        self.micro_batch = self.calls = 0
        if self.pushed:
            self.window, self.pushed = self.full_window, False
        self.discarded = True

    def resume(self, updates: int) -> None:
        """Go on after so many updates, of this run or of another one."""
        self.updates, self.full_window = updates, self._training.accumulation_at(updates)
        if not (self._said or self.pushed):
            self.window = self.full_window

    def wrote(self) -> None:
        """Count a write of weights by the engine."""
        self.writes += 1

    def gather(self) -> None:
        """The engine may put other tensors in the place of parameters from now on."""
        self.gathered = True

    def close(self) -> None:
        """The engine is closed."""
        self.phase, self.closed = Phase.CLOSED, True
