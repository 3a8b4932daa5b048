"""Where in a window the loop is, and which call may come there."""

from __future__ import annotations

from enum import Enum

from torch import nn

from unishard.distributed import collective_check
from unishard.errors import ContractError

__all__ = ["Phase", "Phases"]


class Phase(Enum):
    """Where in a micro-batch the loop is."""

    OPEN = "open"
    FORWARD_DONE = "forward done"
    BACKWARD_DONE = "backward done"
    CLOSED = "closed"


class Phases:
    """Refuses calls that come at the wrong moment, on this rank or beside another call on another one. `TrainingEngine` inherits it."""

    _module: nn.Module
    _phase: Phase
    _updates: int
    _window: int
    _micro_batch: int
    _graph: bool
    """Whether a forward has made a graph that no backward has used."""
    _is_frozen: bool
    _desync: collective_check.Member | None

    def _require_open(self, call: str) -> None:
        if self._phase is Phase.CLOSED:
            raise ContractError(f"{call} was called on a closed engine; build the model anew and prepare it")

    def _enter(self, call: str, detail: str = "") -> None:
        """Before the collectives of a call: raise on every rank where another one is elsewhere. Collective."""
        if collective_check.samples(self._updates):
            self._meet(call, detail)

    def _meet(self, call: str, detail: str = "") -> None:
        """The same, in every update."""
        if self._desync is None:
            return
        if self._module.training:
            where = f"update {self._updates + 1}, micro-batch {self._micro_batch + 1} of {self._window}"
        else:
            where = f"evaluation, after update {self._updates}"
        self._desync.enter(call, where + detail)

    def _require_boundary(self, call: str) -> None:
        self._require_open(call)
        if self._is_frozen:
            raise ContractError(f"{call} was called inside engine.frozen(), where no parameter is trainable; call it after the block")
        if self._micro_batch or self._phase is Phase.BACKWARD_DONE:
            raise ContractError(f"{call} was called inside an accumulation window; call it when step().updated or .skipped is true")

    def _require_end_of_window(self, call: str) -> None:
        self._require_open(call)
        if self._phase is not Phase.BACKWARD_DONE or self._micro_batch + 1 < self._window:
            done = self._micro_batch + (self._phase is Phase.BACKWARD_DONE)
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
