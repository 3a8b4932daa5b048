"""What a rare case adds to the calls of a sharded model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext


class FSDPCase:
    """Called for each call of the model, in the order of the run's list; by default it does nothing."""

    def begin(self, *, last: bool) -> None:
        """Called before the forward of a micro-batch, where the one before was not `last` in its window and it is, or
        the other way around.
        """

    def before_forward(self) -> None:
        """Called before each forward."""

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        """A block with a backward. Collective if its micro-batch is the last of a window."""
        return nullcontext()

    def before_reshard(self) -> None:
        """Called before all modules are sharded."""

    def after_reshard(self) -> None:
        """Called after all modules were sharded. Collective."""

    def finish(self) -> None:
        """Make the gradients of a window those that the update uses; called once or twice at its end. Collective."""

    def forget(self) -> None:
        """Called after an update, or when a window is dropped."""

    def written(self) -> None:
        """Called after weights were written in place."""

    def close(self) -> None:
        """Remove the hooks from the model."""
