"""What a guard is, and the list of them that a training loop goes through."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import IntEnum
from typing import Any, NamedTuple

from torch import Tensor, nn

from unishard.engine.place import LoopPlace
from unishard.failures.compared_call import ComparedCall
from unishard.observe.listeners import Listeners


class Looks(IntEnum):
    """When a guard looks."""

    ALWAYS = 0
    """In every micro-batch: it reads what costs nothing, such as the versions of tensors."""
    AT_UPDATES = 1
    """In the updates that `Sampling` chooses."""
    CLOSELY = 2
    """In the micro-batches that `Sampling` chooses: it waits for the device, or has a hook on each module."""


class WatchedModule(NamedTuple):
    """A module of which guards are told when a forward runs it."""

    module: nn.Module
    name: str
    title: str
    """`blocks.0 (Block)`."""
    is_unit: bool
    """Whether its parameters are gathered together."""
    is_gathered: bool
    """Whether it is a unit or another module inside the model that gathers when it is entered."""


class Guard:
    """Finds one mistake that trains wrongly in silence, hangs, or ends in an error that misleads.

    A guard overrides what it looks at, and raises there what is wrong, or warns of it.
    """

    looks = Looks.ALWAYS
    """When it does."""
    always: Collection[str] = ()
    """Names of modules of which it is told in every forward from now on, and not only where it is looked closely."""

    def before_forward(self) -> None:
        """A forward in training mode is about to begin. Before the ranks compare the call."""

    def forward(self, inputs: Any) -> AbstractContextManager[Any]:
        """The block that runs the model."""
        return nullcontext()

    def called(self, part: WatchedModule, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A forward has called a module, whose parameters may not be gathered yet. May return other arguments."""

    def entered(self, part: WatchedModule, args: Any, kwargs: Any) -> None:
        """Its parameters are gathered, and its own forward is about to begin."""

    def left(self, part: WatchedModule, output: Any) -> None:
        """Its own forward has ended, and its parameters are still gathered."""

    def returned(self, part: WatchedModule, output: Any) -> None:
        """The engine is done with it; also after an error in it."""

    def after_forward(self) -> None:
        """The model has run."""

    def before_backward(self, loss: Tensor, call: ComparedCall) -> None:
        """A backward is about to begin. Before the ranks compare the call."""

    def after_backward(self) -> None:
        """It has ended."""

    def before_finish(self) -> None:
        """The engine is about to change gradients: it makes those of a window final."""

    def before_step(self, call: ComparedCall) -> None:
        """The step of a micro-batch is about to begin. Before the ranks compare the call, which they do at the last."""

    def after_update(self) -> None:
        """An update was made, or skipped."""

    def after_outcome(self, *, skipped: bool, lowered: bool) -> None:
        """It is known whether the last update was skipped, and whether fp16's loss scale was lowered for that."""

    def forget(self) -> None:
        """The window was discarded."""

    def close(self) -> None:
        """The engine is closed."""


class Due(Listeners):
    """What the guards that look at one time do, by event, in the order of the list."""

    before_forward: list[Callable[[], None]]
    forward: list[Callable[[Any], AbstractContextManager[Any]]]
    called: list[Callable[[WatchedModule, Any, Any], tuple[Any, Any] | None]]
    entered: list[Callable[[WatchedModule, Any, Any], None]]
    left: list[Callable[[WatchedModule, Any], None]]
    returned: list[Callable[[WatchedModule, Any], None]]
    after_forward: list[Callable[[], None]]
    before_backward: list[Callable[[Tensor, ComparedCall], None]]
    after_backward: list[Callable[[], None]]
    before_finish: list[Callable[[], None]]
    before_step: list[Callable[[ComparedCall], None]]
    after_update: list[Callable[[], None]]
    after_outcome: list[Callable[..., None]]
    forget: list[Callable[[], None]]
    close: list[Callable[[], None]]

    def around(self, inputs: Any) -> AbstractContextManager[Any]:
        """The block that runs the model."""
        return _together(self.forward, inputs) if self.forward else nullcontext()


@contextmanager
def _together(blocks: Iterable[Callable[[Any], AbstractContextManager[Any]]], inputs: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block(inputs))
        yield


class Guards:
    """The guards of a training loop."""

    def __init__(self, place: LoopPlace, guards: Iterable[Guard]) -> None:
        """Begin to look.

        Args:
            place: Where the loop is.
            guards: In the order in which they look.
        """
        self._place = place
        every = [*guards]
        self._due = {level: Due(Guard, (each for each in every if each.looks <= level)) for level in Looks}
        self.all = self._due[Looks.CLOSELY]
        """All of them."""

    def now(self) -> Due:
        """Those that look at the current micro-batch."""
        if not self._place.looks_at_update:
            return self._due[Looks.ALWAYS]
        return self.all if self._place.looks else self._due[Looks.AT_UPDATES]
