"""What watches a training loop: the protocol, and the one place that tells all who watch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from unishard.contract.results import Step


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


_EVENTS = [name for name in vars(Observer) if name.startswith("on_")]


class Observers(Observer):
    """Tells the observers of an engine, and the progress bar of the current loop, what each overrides."""

    def __init__(self, *observers: Observer) -> None:
        """Begin to tell.

        Args:
            observers: Of a forward they are told in the opposite order, so that the first one sees least of the others.
        """
        self._observers = observers
        self._bar: Observer | None = None
        self._listen()

    def show(self, bar: Observer | None) -> Observer | None:
        """Show the progress bar of another loop, or none; returns the previous one."""
        before, self._bar = self._bar, bar
        self._listen()
        return before

    def _listen(self) -> None:
        watching = [observer for observer in (self._bar, *self._observers) if observer is not None]
        for event in _EVENTS:
            tells = [
                getattr(observer, event)
                for observer in watching
                if getattr(type(observer), event) is not getattr(Observer, event)
            ]
            setattr(self, event, partial(_tell, tells[::-1] if event == "on_forward" else tells))

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A block that saves."""
        self.on_save()
        began = time.perf_counter()
        try:
            yield
        finally:
            self.on_saved(time.perf_counter() - began)


def _tell(tells: Sequence[Callable[..., None]], *arguments: Any) -> None:
    for tell in tells:
        tell(*arguments)
