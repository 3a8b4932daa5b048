"""What `engine.batches` returns: passes over a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Passes(Generic[T]):
    """Passes over a loader: each iteration is one, as over torch's `DataLoader`.

    `next` reads on in a pass that it has begun itself.
    """

    def __init__(self, begin: Callable[[bool], Iterator[T]], length: Callable[[], int | None], loader: Any) -> None:
        """Called by `Engine.batches` and `Engine.windows`.

        Args:
            begin: Begins a pass; takes whether there was one before.
            length: The number of items that the next pass yields; None if unknown.
            loader: What is read.
        """
        self._begin, self._length, self._loader = begin, length, loader
        self._again = False
        self._begun: Iterator[T] | None = None
        """The pass that `next` reads."""

    def __iter__(self) -> Iterator[T]:
        begun, self._begun = self._begun, None
        return self._new() if begun is None else begun

    def __next__(self) -> T:
        if self._begun is None:
            self._begun = self._new()
        try:
            return next(self._begun)
        except StopIteration:
            self._begun = None
            raise

    def __len__(self) -> int:
        """How many items the next pass yields: of a resumed loop, the rest of the epoch.

        Raises:
            TypeError: The loader has no length.
        """
        length = self._length()
        if length is None:
            raise TypeError(f"{type(self._loader).__name__} has no length")
        return length

    def _new(self) -> Iterator[T]:
        again, self._again = self._again, True
        return self._begin(again)
