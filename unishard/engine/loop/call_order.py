"""The engine's position in the loop, and which calls are allowed there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from unishard.config import Communication, Precision
from unishard.engine.guards.sampling import Sampling
from unishard.engine.loop import forward_errors
from unishard.engine.loop.phase import Phase
from unishard.engine.loop.wrong_calls import ANY, WRONG
from unishard.errors import ContractError
from unishard.failures import collective_check
from unishard.failures.compared_call import ComparedCall


class CallOrder:
    """Refuses calls in the wrong order, and calls that differ between ranks."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        *,
        window: int,
        backward_calls: int = 1,
        seed: int,
        precision: Precision,
        communication: Communication,
    ) -> None:
        """Start before the first call. Collective.

        Args:
            module: The model.
            device: Where this rank computes.
            window: Micro-batches in a full accumulation window.
            backward_calls: Calls of `backward` for each.
            seed: What chooses the micro-batches that the guards look at; the same on all ranks.
            precision: What the errors of a forward name.
            communication: How calls are compared between the ranks.
        """
        self._module = module
        self._precision = precision
        self._device = device
        self._member = collective_check.join(communication)
        self._sampling = Sampling(seed)
        self.looks_at_update = True
        """Whether the guards look at some micro-batch of the current update with what costs time, see `Sampling`."""
        self._trained = module.training
        self._began, self._seconds = time.monotonic(), 0.0
        """When the current window began, and what the last one took."""
        self.inside_forward = False
        """Whether the engine runs the model, so that a call of it is the model's own."""
        self.inside_backward = False
        """Whether the engine's own backward runs."""
        self._closing: list[Callable[[], None]] = []
        self._slowest = 0.0
        """What the window before the last check took, on the slowest rank."""
        self._checks_all = self._checks_ends = True
        """Whether all calls of the current update are checked, and whether where it begins and its step."""
        self.phase = Phase.OPEN
        self.closed = False
        self.failed = ""
        """What has raised an error in this window: the forward or the backward."""
        self.gradients_read = False
        """Whether the gradients of this window are final."""
        self.full_window = self.window = window
        """Micro-batches in a full accumulation window, and in the current one."""
        self.micro_batch = 0
        """Micro-batches of the current window that are done."""
        self.backward_calls, self.calls = backward_calls, 0
        """Calls of `backward` for each micro-batch, and those for the current one."""
        self.pushed = False
        """Whether the caller says where the current window ends, see `set_boundary`."""
        self.updates = 0
        """Accumulation windows that have ended."""
        self.writes = 0
        """How often the engine itself has written weights other than by an update."""
        self.gathered = False
        """Whether a module has run or weights were unsharded, with which engines replace parameters or their data by
        other tensors."""
        self.graph = False
        """Whether a forward has built a graph that no backward has used."""
        self.discarded = False
        """Whether the window was discarded."""
        self.frozen = False
        """Whether `engine.weights.frozen()` is open."""
        self.averaged = False
        """Whether the model has averaged weights, inside `ema.weights()`."""
        self.unsharded = False
        """Whether `engine.weights.unsharded()` is open."""
        self.before_update: Callable[[], None] | None = None
        """A check to make once, in the next forward that begins an update; collective."""

    @property
    def begins_window(self) -> bool:
        """Whether the next forward is the first of its window."""
        return self.phase is Phase.OPEN and not (self.micro_batch or self.calls)

    @property
    def last(self) -> bool:
        """Whether the window ends with the coming backward, or with the one that ran."""
        return self.micro_batch + 1 == self.window and self.calls + 1 >= self.backward_calls

    @property
    def backward_missing(self) -> bool:
        """Whether the current micro-batch has had some of its calls of `backward`, but not all."""
        return 0 < self.calls < self.backward_calls

    @property
    def forward_missing(self) -> bool:
        """Whether the next part of a loss has had no forward."""
        return self.phase is Phase.OPEN and 0 < self.calls < self.backward_calls

    @property
    def looks(self) -> bool:
        """Whether they look at the current micro-batch."""
        return self._sampling.all or self._sampling.chosen == self.micro_batch

    @property
    def inside_window(self) -> bool:
        """Whether a window has begun and not ended."""
        return bool(self.micro_batch or self.calls)

    # -- comparing the ranks' calls ----------------------------------------------------------------

    def check_sampled(self, call: str, detail: str = "") -> None:
        """`compare` a call that has no more than a name, and what must be the same on all ranks, in words."""
        self.compare(ComparedCall(call, detail))

    def compare(self, call: ComparedCall) -> None:
        """Check that all ranks make the same call. Collective.

        Before the call's collectives in the first updates, in long ones, and in those that the guards look at; also
        where a tenth update begins, before it is made, and where the model has changed between training and evaluation.
        Else together with the next call that is checked.

        Raises:
            RankMismatchError: They do not; names each rank's call.
        """
        if self._member is None:
            return
        changed, self._trained = self._trained is not self._module.training, self._module.training
        if changed or self._checks_all or (self._checks_ends and (call.name == "step" or self.begins_window)):
            self._slowest = self._member.check_now(call, self._where(), self._seconds)
        else:
            self._member.record(call, self._where())

    def check_now(self, call: str, detail: str = "") -> None:
        """Check a call before its collectives, in every update. Collective.

        Raises:
            RankMismatchError: They do not; names each rank's call.
        """
        if self._member is not None:
            self._slowest = self._member.check_now(ComparedCall(call, detail), self._where(), self._seconds)

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        """A block that runs the model, in which `enter_module` counts.

        Raises:
            ModelError: torch does not compute with the dtypes that the config gives the model.
        """
        self.inside_forward = self.gathered = True
        try:
            yield
        except RuntimeError as error:
            told = forward_errors.explain_dtype(error, self._module, self._precision)
            if told is not None:
                raise told from error
            raise
        finally:
            self.inside_forward = False

    def enter_module(self, name: str) -> None:
        """Check that the forward enters the same module on all ranks: in the first updates before its parameters are
        gathered. Collective.

        Raises:
            RankMismatchError: The ranks enter different modules; names them.
        """
        if self.inside_forward and self._member is not None:
            self._member.enter_module(
                name, wait=self._module.training and collective_check.samples_modules(self.updates)
            )

    @property
    def compares_ranks(self) -> bool:
        """Whether there are other ranks to compare with."""
        return self._member is not None

    def on_close(self, act: Callable[[], None]) -> None:
        """Call a function when the engine is closed."""
        self._closing.append(act)

    def _where(self) -> str:
        if self._module.training:
            return f"update {self.updates + 1}, micro-batch {self.micro_batch + 1} of {self.window}"
        return f"evaluation, after update {self.updates}"

    def awaiting(self) -> AbstractContextManager[None]:
        """A block with device collectives whose result the host reads, in the block or later."""
        return nullcontext() if self._member is None else self._member.reading(self._device)

    # -- transitions -------------------------------------------------------------------------------

    def begin_window(self, length: int) -> None:
        """Begin a new window.

        Raises:
            ContractError: The last one has not ended.
        """
        if self.micro_batch:
            self.require("begin_window")
        self.window, self.discarded, self.pushed = length, False, False

    def set_boundary(self, last: bool) -> None:
        """Say whether the coming micro-batch ends its window.

        Raises:
            ContractError: It is known already: by a loop over batches, or by a forward that waits for its backward.
        """
        self.require("set_boundary")
        if self.graph and last is not (self.micro_batch + 1 == self.window):
            raise ContractError(
                "set_boundary was called after a forward that was told otherwise; call it before the first forward of "
                "a micro-batch"
            )
        self.pushed, self.window = True, self.micro_batch + (1 if last else 2)

    def run_before_update(self) -> None:
        """Make the check that waits for the beginning of an update. Collective."""
        if self.before_update is not None:
            self.before_update()
            self.before_update = None

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

    def end_micro_batch(self) -> None:
        """Count a micro-batch."""
        if self.pushed and not self.last:
            self.window += 1  # until the caller says where it ends
        self.phase, self.graph, self.calls = Phase.OPEN, False, 0
        self.micro_batch += 1

    def go_on(self) -> None:
        """Count a micro-batch that has no step; whether the next one ends the window is as for it.

        Raises:
            ContractError: The gradients of the window were read, and so finished.
        """
        self.require("go_on")
        ends = self.last
        self.window = self.micro_batch + 2
        self.end_micro_batch()
        self.window = self.micro_batch + (1 if ends else 2)

    def end_window(self) -> None:
        """End the window after its update was made or skipped."""
        self.window, self.micro_batch, self.pushed, self.gradients_read = self.full_window, 0, False, False
        self.updates += 1
        self.looks_at_update = self._sampling.next_update(self.full_window)
        self._checks_all = self.looks_at_update or collective_check.samples_all(self.updates, self._slowest)
        self._checks_ends = collective_check.samples(self.updates)
        self._began, before = time.monotonic(), self._began
        self._seconds = self._began - before

    def discard_window(self) -> None:
        """Discard the window after its gradients were dropped."""
        self.phase, self.graph, self.gradients_read, self.failed = Phase.OPEN, False, False, ""
        self.micro_batch = self.calls = 0
        if self.pushed:
            self.window, self.pushed = self.full_window, False
        self.discarded = True

    def close(self, why: BaseException | None) -> None:
        """Refuse all further calls."""
        self.phase, self.closed = Phase.CLOSED, True
        while self._closing:
            self._closing.pop()()
        if self._member is not None:
            self._member.leave(why)

    @property
    def only_evaluated(self) -> bool:
        """Whether the micro-batch can have had a forward in evaluation mode only."""
        return self.phase is Phase.OPEN and not self._module.training

    @property
    def length_known(self) -> bool:
        """Whether a window has begun whose length is known."""
        return bool(self.micro_batch) and not self.pushed

    @property
    def gradients_not_final(self) -> bool:
        """Whether the last backward of a window has not run, or its step has."""
        return self.phase is not Phase.BACKWARD_DONE or not self.last

    @property
    def holds_gradients(self) -> bool:
        """Whether there are gradients that a call such as `zero_grad()` would drop."""
        return not self.closed and self.inside_window

    def require(self, call: str, *, like: str = "") -> None:
        """Check that a call is allowed here.

        Args:
            call: Its name in the error.
            like: The call whose row of `WRONG` counts; by default this one.

        Raises:
            ContractError: It is not.
        """
        for place, text in WRONG.get(like or call, ANY).items():
            if place is self.phase or (isinstance(place, str) and getattr(self, place)):
                done = self.micro_batch + (self.phase is Phase.BACKWARD_DONE)
                raise ContractError(
                    text.format(
                        call=call,
                        done=done,
                        window=self.window,
                        micro_batch=self.micro_batch,
                        failed=self.failed,
                        calls=self.calls,
                        backward_calls=self.backward_calls,
                    )
                )

    def require_open(self, call: str) -> None:
        """Raise ContractError on a closed engine."""
        if self.closed:
            self.require(call, like="any")

    def wrote(self) -> None:
        """Count a write of weights by the engine."""
        self.writes += 1

    def require_no_gradients(self, call: str) -> None:
        """Raise ContractError inside an accumulation window, whose gradients the call would drop."""
        self.require(call, like="zero_grad")
