"""The blocks in which a run is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class OpenBlocks:
    """Which are open."""

    def __init__(self) -> None:
        self.forward = False
        """Whether the engine runs the model, so that a call of it is the model's own."""
        self.backward = False
        """Whether the engine's own backward runs."""
        self.frozen = False
        """Whether `engine.weights.frozen()` is open."""
        self.averaged = False
        """Whether the model has averaged weights, inside `average.weights()`."""
        self.unsharded = False
        """Whether `engine.weights.unsharded()` is open."""

    @contextmanager
    def inside(self, block: str) -> Iterator[None]:
        """A block, by its name here."""
        before = getattr(self, block)
        setattr(self, block, True)
        try:
            yield
        finally:
            setattr(self, block, before)
