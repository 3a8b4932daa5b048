"""Copies of activations in host memory: made and brought back on a stream of their own, so that they overlap with
computation.

Whole storages are copied, as bytes, so that views of one storage have one copy. What a copy reads or writes on the
device stays referenced until the computing stream has waited for it: with `record_stream`, its memory would be free
again only when the host finds the copy done, which is many units later.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unishard.engine.model.activation_offload.saved import raise_written

_LEAVING = 1
"""Units whose copies may still be under way when the next one has computed."""


class HostCopy:
    """A storage in host memory, and for a while on the device again."""

    def __init__(self, tensor: Tensor, host: Tensor) -> None:
        self._origin = weakref.ref(tensor.untyped_storage())
        self._version = tensor._version
        self.host = host
        """Its bytes."""
        self.device: Tensor | None = None
        """The same on the device; None where they are only on the host."""
        self.arrival: Any = None
        """The event after which they are there."""
        self.torn: tuple[int, ...] | None = None
        """The shape of a tensor that was written in place while it was copied."""

    def is_of(self, tensor: Tensor) -> bool:
        """Whether a tensor has these values."""
        return self._origin() is tensor.untyped_storage() and self._version == tensor._version


class StorageView(NamedTuple):
    """A view of a storage."""

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _Source(NamedTuple):
    """What a copy to the host reads."""

    tensor: Tensor
    version: int
    copy: weakref.ref[HostCopy]

    def check(self) -> None:
        """Find out whether it was written before it was copied."""
        copy = self.copy()
        if copy is not None and self.tensor._version != self.version:
            copy.torn = tuple(self.tensor.shape)


class ActivationStore:
    """The copies of one model."""

    def __init__(self, device: torch.device, *, pin_memory: bool) -> None:
        """Copy nothing yet.

        Args:
            device: Where the model computes. The CPU's streams are empty, so there each copy is made at once.
            pin_memory: Whether host memory is page-locked.
        """
        self.device = device
        self._pin = pin_memory and device.type != "cpu"
        self._by_address: weakref.WeakValueDictionary[int, HostCopy] = weakref.WeakValueDictionary()
        self._taken: list[_Source] = []
        """Of the unit that computes."""
        self._leaving: deque[tuple[Any, list[_Source]]] = deque()
        """Of units before, with the event after which they are on the host."""
        self._coming: list[tuple[Any, list[Tensor]]] = []
        """What is on its way to the device, with the event after which it is there."""
        self._side: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies of the model, which get memory and a stream of their own."""
        return partial(ActivationStore, pin_memory=self._pin), (self.device,)

    def take(self, tensor: Tensor) -> HostCopy:
        """The copy of a tensor's storage. It is made behind what is queued now; does not wait."""
        address = tensor.untyped_storage().data_ptr()
        copy = self._by_address.get(address)
        if copy is None or not copy.is_of(tensor):
            source = _bytes_of(tensor)
            copy = HostCopy(tensor, torch.empty(source.shape, dtype=torch.uint8, pin_memory=self._pin))
            with self._behind_current():
                copy.host.copy_(source, non_blocking=True)
            # Without its graph, which must not live as long as a copy is under way.
            self._taken.append(_Source(tensor.detach(), tensor._version, weakref.ref(copy)))
            self._by_address[address] = copy
        return copy

    def end_unit(self) -> None:
        """Let go of what units before this one have left on the device."""
        if self._taken:
            self._leaving.append((self._stream().record_event(), self._taken))
            self._taken = []
        self._let_go(_LEAVING)

    def fetch(self, copies: Iterable[HostCopy]) -> None:
        """Bring copies to the device, behind what is queued now; does not wait."""
        absent = [copy for copy in copies if copy.device is None]
        if not absent:
            return
        self._let_go(0)
        arriving = [torch.empty_like(copy.host, device=self.device) for copy in absent]  # of the computing stream
        with self._behind_current():
            for copy, there in zip(absent, arriving, strict=True):
                there.copy_(copy.host, non_blocking=True)
        arrival = self._stream().record_event()
        for copy, there in zip(absent, arriving, strict=True):
            copy.device, copy.arrival = there, arrival
        self._coming.append((arrival, arriving))

    def arrive(self) -> None:
        """Let the computing stream wait for what is on its way to the device, which belongs to the graph from then
        on.
        """
        for arrival, _ in self._coming:
            self._current().wait_event(arrival)
        self._coming.clear()

    def view(self, copy: HostCopy, like: StorageView) -> Tensor:
        """A tensor on the device, of a copy that was fetched."""
        if copy.torn is not None:
            raise_written(copy.torn)
        assert copy.device is not None
        self._current().wait_event(copy.arrival)  # of this node, if it has a stream of its own
        empty = torch.empty(0, dtype=like.dtype, device=self.device)
        return empty.set_(copy.device.untyped_storage(), like.offset, like.size, like.stride)

    def _let_go(self, units: int) -> None:
        while len(self._leaving) > units:
            gone, sources = self._leaving.popleft()
            self._current().wait_event(gone)
            for source in sources:
                source.check()

    @contextmanager
    def _behind_current(self) -> Iterator[None]:
        """A block whose copies run on the side stream, behind what is queued now."""
        side = self._stream()
        side.wait_stream(self._current())
        with torch.get_device_module(self.device).stream(side):
            yield

    def _stream(self) -> Any:
        if self._side is None:
            self._side = torch.get_device_module(self.device).Stream()
        return self._side

    def _current(self) -> Any:
        return torch.get_device_module(self.device).current_stream()


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
