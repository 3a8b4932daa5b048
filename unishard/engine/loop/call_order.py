"""Which calls are allowed where the loop is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from unishard.config import Precision
from unishard.engine.loop import forward_errors
from unishard.engine.loop.rank_calls import RankCalls
from unishard.engine.loop.wrong_calls import ANY, WRONG
from unishard.engine.open_blocks import OpenBlocks
from unishard.engine.place import LoopPlace, Phase
from unishard.errors import ContractError


class CallOrder:
    """Refuses calls in the wrong place. Has what says that: the place, the open blocks and the calls of the ranks."""

    def __init__(self, module: nn.Module, place: LoopPlace, ranks: RankCalls, precision: Precision) -> None:
        """Start before the first call.

        Args:
            module: The model.
            place: Where the loop is.
            ranks: The calls that the ranks compare.
            precision: What the errors of a forward name.
        """
        self._module, self._precision = module, precision
        self.place, self.blocks, self.ranks = place, OpenBlocks(), ranks
        self._closing: list[Callable[[], None]] = []

    def require(self, call: str, *, like: str = "") -> None:
        """Check that a call is allowed here.

        Args:
            call: Its name in the error.
            like: The call whose row of `WRONG` counts; by default this one.

        Raises:
            ContractError: It is not.
        """
        place, blocks = self.place, self.blocks
        for where, text in WRONG.get(like or call, ANY).items():
            holder = blocks if where in vars(blocks) else place
            if where is place.phase or (isinstance(where, str) and getattr(holder, where)):
                done = place.micro_batch + (place.phase is Phase.BACKWARD_DONE)
                raise ContractError(text.format(call=call, done=done, **vars(place)))

    def require_open(self, call: str) -> None:
        """Raise ContractError on a closed engine."""
        if self.place.closed:
            self.require(call, like="any")

    def require_no_gradients(self, call: str) -> None:
        """Raise ContractError inside an accumulation window, whose gradients the call would drop."""
        self.require(call, like="zero_grad")

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        """A block that runs the model.

        Raises:
            ModelError: torch does not compute with the dtypes that the config gives the model.
        """
        self.place.gather()
        self.blocks.forward = True
        try:
            yield
        except RuntimeError as error:
            told = forward_errors.explain_dtype(error, self._module, self._precision)
            if told is not None:
                raise told from error
            raise
        finally:
            self.blocks.forward = False

    def begin_window(self, length: int) -> None:
        """Begin a new window.

        Raises:
            ContractError: The last one has not ended.
        """
        if self.place.micro_batch:
            self.require("begin_window")
        self.place.begin_window(length)

    def set_boundary(self, last: bool) -> None:
        """Say whether the coming micro-batch ends its window.

        Raises:
            ContractError: It is known already: by a loop over batches, or by a forward that waits for its backward.
        """
        self.require("set_boundary")
        place = self.place
        if place.graph and last is not (place.micro_batch + 1 == place.window):
            raise ContractError(
                "set_boundary was called after a forward that was told otherwise; call it before the first forward of "
                "a micro-batch"
            )
        place.set_boundary(last)

    def on_close(self, act: Callable[[], None]) -> None:
        """Call a function when the engine is closed."""
        self._closing.append(act)

    def close(self, why: BaseException | None) -> None:
        """Refuse all further calls."""
        self.place.close()
        while self._closing:
            self._closing.pop()()
        self.ranks.leave(why)
