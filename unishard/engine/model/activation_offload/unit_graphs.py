"""Forwards of units whose backward is to come: what each has in host memory, and which is next in backward."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from unishard.engine.model.activation_offload.store import ActivationStore, HostCopy, StorageView


class UnitGraph:
    """One forward of a unit; it lives as long as its graph."""

    def __init__(self, before: weakref.ref[UnitGraph] | None) -> None:
        """Hold nothing yet.

        Args:
            before: The forward before it, of any unit.
        """
        self.copies: weakref.WeakSet[HostCopy] = weakref.WeakSet()
        self._before = before

    @property
    def before(self) -> UnitGraph | None:
        """The forward before it, if its backward is to come."""
        return None if self._before is None else self._before()


class UnitGraphs:
    """The forwards of all units of a model, in order. Backward takes them from the last to the first.

    Nothing depends on that order but when copies are made: a unit whose backward comes otherwise fetches its own.
    """

    def __init__(self, copies: ActivationStore) -> None:
        self.copies = copies
        self._last: weakref.ref[UnitGraph] | None = None
        self._running: weakref.ref[UnitGraph] | None = None
        """The one whose backward runs."""

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies of the model, which have no graph yet."""
        return UnitGraphs, (self.copies,)

    def begin(self) -> UnitGraph:
        """The forward of a unit that begins."""
        begun = UnitGraph(self._last)
        self._last = weakref.ref(begun)
        return begun

    def enter(self, own: UnitGraph) -> None:
        """Have the activations of a forward on the device, and those of the one before it on their way."""
        running = None if self._running is None else self._running()
        if running is own:
            return
        self._running = weakref.ref(own)
        self.copies.fetch(own.copies)
        self.copies.arrive()
        ahead = own.before
        wanted = {*own.copies, *(ahead.copies if ahead else ())}
        for copy in {*running.copies} - wanted if running else ():
            copy.device = None  # of a graph that is retained
        if ahead is not None:
            self.copies.fetch(ahead.copies)


class OnHost:
    """A tensor that has left the device."""

    def __init__(self, tensor: Tensor, graphs: UnitGraphs, own: UnitGraph) -> None:
        self._graphs, self._own = graphs, own
        self._copy = graphs.copies.take(tensor)
        self._view = StorageView(tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())
        own.copies.add(self._copy)

    @torch.no_grad()
    def tensor(self) -> Tensor:
        """The tensor, on the device again."""
        self._graphs.enter(self._own)
        return self._graphs.copies.view(self._copy, self._view)
