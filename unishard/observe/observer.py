"""What watches a training loop: the protocol, and those who watch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from unishard.contract.results import Step
from unishard.observe.listeners import Listeners


class Observer:
    """Watches the loop of one engine, on every rank. An observer overrides what it wants to know."""

    def on_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A forward in training mode begins."""

    def on_loss(self, loss: Tensor, num_items: int | Tensor) -> None:
        """A backward begins, of a sum over `num_items`; of a mean these are 1, or 0 where it is added to the last."""

    def on_gradients(self, finish: Callable[[], float]) -> None:
        """A window is about to end; `finish` makes its gradients final and returns their divisor, and is collective."""

    def on_step(self, step: Step) -> None:
        """A window has ended. May be collective."""

    def on_discard(self) -> None:
        """The window was discarded."""

    def on_evaluate(self, evaluates: bool) -> None:
        """An evaluation begins or ends."""

    def on_save(self) -> None:
        """A save begins."""

    def on_saved(self, seconds: float) -> None:
        """A save has ended, or failed."""

    def on_load(self) -> None:
        """A checkpoint was loaded."""

    def on_log(self, values: Mapping[str, float | Tensor]) -> None:
        """The user logs values. Not collective."""

    def on_error(self, error: BaseException) -> None:
        """A forward in training mode, a backward or an update has failed."""

    def on_close(self) -> None:
        """The engine is closed. Not collective."""


class Observers(Listeners):
    """The observers of an engine, and the progress bar of the current loop."""

    on_forward: list[Callable[[tuple[Any, ...], Mapping[str, Any]], None]]
    on_loss: list[Callable[[Tensor, int | Tensor], None]]
    on_gradients: list[Callable[[Callable[[], float]], None]]
    on_step: list[Callable[[Step], None]]
    on_discard: list[Callable[[], None]]
    on_evaluate: list[Callable[[bool], None]]
    on_save: list[Callable[[], None]]
    on_saved: list[Callable[[float], None]]
    on_load: list[Callable[[], None]]
    on_log: list[Callable[[Mapping[str, float | Tensor]], None]]
    on_error: list[Callable[[BaseException], None]]
    on_close: list[Callable[[], None]]

    def __init__(self, *observers: Observer) -> None:
        """Begin to tell.

        Args:
            observers: Of a forward they are told in the opposite order, so that the first one sees least of the others.
        """
        self._observers = observers
        self._bar: Observer | None = None
        self.show(None)

    def show(self, bar: Observer | None) -> Observer | None:
        """Show the progress bar of another loop, or none; returns the previous one."""
        before, self._bar = self._bar, bar
        super().__init__(Observer, self._observers if bar is None else (bar, *self._observers))
        self.on_forward.reverse()
        return before

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A block that saves."""
        for tell in self.on_save:
            tell()
        began = time.perf_counter()
        try:
            yield
        finally:
            for told in self.on_saved:
                told(time.perf_counter() - began)
