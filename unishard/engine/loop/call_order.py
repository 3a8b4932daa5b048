"""The engine's position in the loop, and which calls are allowed there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum

import torch
from torch import Tensor, nn

from unishard.config import Communication, Precision
from unishard.engine.loop import forward_errors
from unishard.engine.loop.sampling import Sampling
from unishard.errors import ContractError
from unishard.failures import collective_check


class Phase(Enum):
    """The state of a micro-batch."""

    OPEN = "open"
    FORWARD_DONE = "forward done"
    BACKWARD_DONE = "backward done"
    CLOSED = "closed"


class CallOrder:
    """Refuses calls in the wrong order, and calls that differ between ranks."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        *,
        window: int,
        seed: int,
        precision: Precision,
        communication: Communication,
    ) -> None:
        """Start before the first call. Collective.

        Args:
            module: The model.
            device: Where this rank computes.
            window: Micro-batches in a full accumulation window.
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
        self._forwarding = False
        self._closing: list[Callable[[], None]] = []
        self._checked, self._due = -1, 0
        """The last update whose calls were all checked, and the next one whose calls will be."""
        self.phase = Phase.OPEN
        self.full_window = self.window = window
        """Micro-batches in a full accumulation window, and in the current one."""
        self.micro_batch = 0
        """Micro-batches of the current window that are done."""
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
        return not self.micro_batch and self.phase is Phase.OPEN

    @property
    def last(self) -> bool:
        """Whether the current micro-batch is the last of its window."""
        return self.micro_batch + 1 == self.window

    @property
    def looks(self) -> bool:
        """Whether they look at the current micro-batch."""
        return self._sampling.all or self._sampling.chosen == self.micro_batch

    @property
    def inside_window(self) -> bool:
        """Whether a window has begun and not ended."""
        return bool(self.micro_batch) or self.phase is Phase.BACKWARD_DONE

    # -- comparing the ranks' calls ----------------------------------------------------------------

    def check_sampled(self, call: str, detail: str = "", *, skipped: str = "", order: str = "", held: str = "") -> None:
        """Check that all ranks make the same call. Collective.

        Before the call's collectives in the first updates, in later ones that are not shorter than the check can be,
        in every tenth and in those that the guards look at; also where the model has changed between training and
        evaluation. Else together with the next call that is checked.

        Args:
            call: A method of the engine.
            detail: What must be the same on all ranks, in words.
            skipped: What has no gradient on this rank, see `ReachedParameters`; must be the same on all ranks.
            order: A hash of the order of gradients, the same on all ranks.
            held: What the update uses, see `EqualValues`; the same on all ranks. Only compared in updates that are
                sampled.

        Raises:
            RankMismatchError: They do not; names each rank's call.
        """
        if self._member is None:
            return
        changed, self._trained = self._trained is not self._module.training, self._module.training
        if (
            changed
            or self.updates >= self._due
            or self.updates == self._checked
            or collective_check.samples(self.updates)
            or self.looks_at_update
        ):
            self.check_now(call, detail, skipped=skipped, order=order, held=held)
        else:
            self._member.record(call, self._where(detail), skipped=skipped, order=order)

    def check_now(self, call: str, detail: str = "", *, skipped: str = "", order: str = "", held: str = "") -> None:
        """Check before the call's collectives, in every update; the arguments are those of `check_sampled`. Collective.

        Raises:
            RankMismatchError: They do not; names each rank's call.
        """
        if self._member is not None:
            slowest = self._member.check_now(
                call, self._where(detail), self._seconds, skipped=skipped, order=order, held=held
            )
            if self.updates >= self._due:
                self._checked, self._due = self.updates, self.updates + collective_check.interval(slowest)

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        """A block that runs the model, in which `enter_module` counts.

        Raises:
            ModelError: torch does not compute with the dtypes that the config gives the model, or with its inputs.
        """
        self._forwarding = self.gathered = True
        try:
            yield
        except (RuntimeError, IndexError) as error:
            told = forward_errors.explain_dtype(error, self._module, self._precision)
            if told is not None:
                raise told from error
            told = forward_errors.explain_input(error, self._module)
            if told is not None:
                raise told from None  # it names the line: what torch says of it, deep inside, adds nothing
            raise
        finally:
            self._forwarding = False

    @property
    def inside_forward(self) -> bool:
        """Whether the engine runs the model, so that a call of it is the model's own."""
        return self._forwarding

    def enter_module(self, name: str) -> None:
        """Check that the forward enters the same module on all ranks: in the first updates before its parameters are
        gathered. Collective.

        Raises:
            RankMismatchError: The ranks enter different modules; names them.
        """
        if self._forwarding and self._member is not None:
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

    def _where(self, detail: str) -> str:
        if self._module.training:
            return f"update {self.updates + 1}, micro-batch {self.micro_batch + 1} of {self.window}{detail}"
        return f"evaluation, after update {self.updates}{detail}"

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
            raise ContractError(
                f"a new accumulation window starts after {self.micro_batch} of {self.window} micro-batches of the last "
                "one; call backward and step for every batch, and leave a loop only when step().updated or "
                "step().skipped is true"
            )
        self.window, self.discarded, self.pushed = length, False, False

    def set_boundary(self, last: bool) -> None:
        """Say whether the coming micro-batch ends its window.

        Raises:
            ContractError: It is known already: by a loop over batches, or by a forward that waits for its backward.
        """
        self.require_open("set_boundary")
        if self.phase is Phase.BACKWARD_DONE:
            raise ContractError("set_boundary was called after backward; call engine.step() first, then set_boundary")
        if self.micro_batch and not self.pushed:
            raise ContractError(
                f"set_boundary was called after {self.micro_batch} of {self.window} micro-batches of a window; call it "
                "before each forward from the first one on, and not in a loop over engine.batches or engine.windows"
            )
        if self.graph and last is not self.last:
            raise ContractError(
                "set_boundary was called after a forward that was told otherwise; call it before the first forward of "
                "a micro-batch"
            )
        self.pushed, self.window = True, self.micro_batch + (1 if last else 2)

    def end_micro_batch(self) -> bool:
        """Count a micro-batch; whether its window has ended."""
        ended, self.phase, self.graph = self.last, Phase.OPEN, False
        self.micro_batch += 1
        if self.pushed and not ended:
            self.window += 1  # until the caller says where it ends
        return ended

    def go_on(self) -> None:
        """Count a micro-batch that has no step; whether the next one ends the window is as for it."""
        ends = self.last
        self.window = self.micro_batch + 2
        self.end_micro_batch()
        self.window = self.micro_batch + (1 if ends else 2)

    def end_window(self) -> None:
        """End the window after its update was made or skipped."""
        self.window, self.micro_batch, self.pushed = self.full_window, 0, False
        self.updates += 1
        self.looks_at_update = self._sampling.next_update(self.full_window)
        self._began, before = time.monotonic(), self._began
        self._seconds = self._began - before

    def discard_window(self) -> None:
        """Discard the window after its gradients were dropped."""
        self.phase, self.graph, self.micro_batch = Phase.OPEN, False, 0
        if self.pushed:
            self.window, self.pushed = self.full_window, False
        self.discarded = True

    def close(self, why: BaseException | None) -> None:
        """Refuse all further calls."""
        self.phase = Phase.CLOSED
        while self._closing:
            self._closing.pop()()
        if self._member is not None:
            self._member.leave(why)

    # -- refusals ----------------------------------------------------------------------------------

    def require_open(self, call: str) -> None:
        """Raise ContractError on a closed engine."""
        if self.phase is Phase.CLOSED:
            raise ContractError(f"{call} was called on a closed engine; build a new model and prepare it")

    def require_sharded(self, call: str) -> None:
        """Raise ContractError inside `unsharded`."""
        if self.unsharded:
            raise ContractError(
                f"{call} was called inside engine.weights.unsharded(), where weights are full for a forward and its "
                "backward; call it after the block"
            )

    def require_boundary(self, call: str) -> None:
        """Raise ContractError on a closed engine, inside an accumulation window, and inside `frozen` and
        `unsharded`.
        """
        self.require_open(call)
        self.require_sharded(call)
        if self.frozen:
            raise ContractError(
                f"{call} was called inside engine.weights.frozen(), where no parameter is trainable; call it after the "
                "block"
            )
        if self.averaged and call != "export":
            raise ContractError(
                f"{call} was called inside average.weights(), where the model has averaged weights; call it after the "
                "block"
            )
        if self.inside_window:
            raise ContractError(
                f"{call} was called inside an accumulation window; call it when step().updated or .skipped is true"
            )

    def require_backward(self, loss: object, *, training: bool) -> None:
        """Raise ContractError unless a backward of this loss is allowed now."""
        if self.phase is Phase.BACKWARD_DONE:
            raise ContractError(
                "backward was called twice for one micro-batch; add up the losses of its forwards, or call "
                "engine.step() after every backward"
            )
        if self.phase is Phase.OPEN and not training:
            raise ContractError(
                "backward was called in evaluation mode, where engine(...) builds no graph; call engine.train() before "
                "the forward"
            )
        if self.phase is Phase.OPEN:
            raise ContractError(
                "backward was called without a forward of the engine; compute the loss with engine(...) in training "
                "mode, not engine.module"
            )
        if not isinstance(loss, Tensor):
            raise ContractError(
                f"backward needs a scalar loss tensor, got {type(loss).__name__}; pass the loss itself, such "
                "as output.loss"
            )
        if loss.dim():
            raise ContractError(
                f"backward needs a scalar loss, got shape {tuple(loss.shape)}; pass its mean, such as loss.mean()"
            )
        if loss.requires_grad and loss.grad_fn is None:
            raise ContractError(
                "backward got a tensor that no forward has computed, as cached losses (GradCache) return, whose hook "
                "runs backwards that no engine knows; call engine.framework.scaled_backward((embeddings * "
                "cached).sum()) for each chunk, with the gradient that was cached for its embeddings: docs/access.md"
            )
        if not loss.requires_grad:
            raise ContractError(
                "backward needs a loss with a graph; it was computed in evaluation mode, under no_grad, detached, or "
                "from frozen parameters only"
            )

    def require_end_of_window(self, call: str) -> None:
        """Raise ContractError unless the last backward of a window has run and `step` has not."""
        self.require_open(call)
        if self.phase is not Phase.BACKWARD_DONE or not self.last:
            done = self.micro_batch + (self.phase is Phase.BACKWARD_DONE)
            raise ContractError(
                f"{call} was called after {done} of {self.window} backward calls of the window, when the gradients are "
                "not final; call it between the last backward of a window and engine.step()"
            )

    def require_no_gradients(self, call: str) -> None:
        """Raise ContractError inside an accumulation window, whose gradients a call such as `zero_grad()` would
        drop.
        """
        if self.phase is not Phase.CLOSED and self.inside_window:
            done = self.micro_batch + (self.phase is Phase.BACKWARD_DONE)
            raise ContractError(
                f"{call} was called after {done} of {self.window} backward calls of the accumulation window, and would "
                "drop their gradients; remove the call: engine.step() zeroes gradients after each update, and "
                "engine.discard() drops a window"
            )

    def require_no_graph(self, call: str) -> None:
        """Raise ContractError while the graph of a forward waits for its backward, and inside `unsharded`."""
        self.require_open(call)
        self.require_sharded(call)
        if self.averaged:
            raise ContractError(
                f"{call} was called inside average.weights(), where the model has averaged weights; call it after the "
                "block"
            )
        if self.graph:
            raise ContractError(
                f"{call} would change a parameter that the backward of an earlier forward still needs; call it after "
                "backward, or drop the forward with engine.discard(); a forward under torch.no_grad() is allowed"
            )
