"""Groups a loader's batches into accumulation windows and moves them to the device."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Sized
from itertools import islice
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from unishard.distributed import agreement
from unishard.errors import ContractError

Enter = Callable[[str, str], None]
"""Called before each comparison between ranks, with the name of the call and a detail."""


Place = Callable[[Any, torch.device], Any]
"""Makes of a batch what this rank gets of it on its device: `to_device`, or also a part of each sample."""


class Window(Sequence[Any]):
    """The batches of one accumulation window on this rank.

    Each is moved to the device when it is accessed, not before.
    """

    def __init__(
        self,
        batches: Sequence[Any],
        device: torch.device,
        watch: Callable[[Any], None] | None = None,
        place: Place | None = None,
    ) -> None:
        self._batches = batches
        self._device = device
        self._watch = watch
        self._place = place or to_device

    @property
    def unmoved(self) -> Sequence[Any]:
        """The batches as the loader has yielded them."""
        return self._batches

    def watched_by(self, watch: Callable[[Any], None]) -> Window:
        """The same window, which calls `watch` with each batch that is accessed."""
        return Window(self._batches, self._device, watch, self._place)

    def __len__(self) -> int:
        return len(self._batches)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Window: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Window(self._batches[index], self._device, self._watch, self._place)
        batch = self._batches[index]
        if self._watch is not None:
            self._watch(batch)
        return self._place(batch, self._device)


def _ignore(call: str, detail: str) -> None:
    """The default `Enter`."""


def windows(
    loader: Iterable[Any],
    lengths: Iterable[int],
    device: torch.device,
    *,
    drop: bool,
    enter: Enter | None = _ignore,
    begin: Callable[[], None] | None = None,
    place: Place | None = None,
) -> Iterator[Window]:
    """Group a loader's batches into accumulation windows. The last one may be shorter. Collective.

    Ranks with loaders of different lengths would deadlock, so the lengths are compared: once at the start if
    `len(loader)` is known, else before each window.

    Args:
        loader: Yields this rank's batches.
        lengths: Batches in each full window.
        device: Where this rank computes.
        drop: Whether to drop an incomplete last window.
        enter: Called before each comparison between ranks; None disables the comparison.
        begin: Called before the first batch is read, after the comparison.
        place: What moves a batch to the device; by default `to_device`.

    Raises:
        ContractError: A length is not positive.
        RankMismatchError: On every rank, naming the lengths that differ.
    """
    total = length_of(loader)
    if enter is not None:
        enter("batches", "")
        agreement.agree({"len(loader)": total}, "numbers of batches")
    if begin is not None:
        begin()
    rest = iter(loader)
    yielded = 0
    for length in lengths:
        if not isinstance(length, int) or length < 1:
            raise ContractError(
                f"an accumulation window needs at least 1 batch, got a length of {length!r}; yield positive integers"
            )
        window = list(islice(rest, length))
        if total is None and enter is not None:
            enter("batches", f", after {yielded} batches")
            if not agreement.equal(len(window)):
                agreement.agree({f"batches after {yielded}": len(window)}, "numbers of batches")
        if not window or (drop and len(window) < length):
            return
        yield Window(window, device, place=place)
        yielded += len(window)
        if len(window) < length:
            return


def length_of(loader: Iterable[Any]) -> int | None:
    """Number of batches that the loader will yield; None if unknown."""
    if not isinstance(loader, Sized) or isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None  # torch's DataLoader only guesses the length of an iterable dataset
    try:
        return len(loader)
    except TypeError:  # a DataLoader has __len__ even if its sampler does not
        return None


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a batch to the device.

    Traverses dicts, such as transformers' `BatchEncoding`, lists, tuples, named tuples and dataclasses, and calls
    `.to(device)` on other objects that have it. Copies to a CUDA device start in pinned memory, so that neither the
    host nor the device waits for them, except those of an object's own `.to`. A container without tensors to move is
    returned unchanged, not copied.
    """
    if isinstance(batch, Tensor):
        if device.type == "cuda" and batch.device.type == "cpu":
            return _pinned(batch).to(device, non_blocking=True)
        return batch.to(device)
    if isinstance(batch, dict | UserDict):  # their own `.to`, as that of `BatchEncoding`, would wait for each copy
        return _rebuilt_mapping(batch, _moved(batch.items(), device))
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return _rebuilt_mapping(batch, _moved(batch.items(), device))
    if isinstance(batch, list | tuple):
        return _rebuilt_sequence(batch, _moved(enumerate(batch), device))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return _rebuilt_dataclass(
            batch, _moved(((field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch)), device)
        )
    return batch


def _pinned(tensor: Tensor) -> Tensor:
    """The tensor in pinned memory, which torch does not give to others before the copies from it are through."""
    return tensor if tensor.layout != torch.strided or tensor.is_pinned() else tensor.pin_memory()


def _moved(items: Iterable[tuple[Any, Any]], device: torch.device) -> dict[Any, Any]:
    """The items that change."""
    return {key: new for key, old in items if (new := to_device(old, device)) is not old}


def _rebuilt_mapping(batch: Mapping[Any, Any], moved: dict[Any, Any]) -> Mapping[Any, Any]:
    if not moved:
        return batch
    # copy.copy keeps what a plain dict would lose, such as a default factory.
    new = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
    new.update(moved)
    return new


def _rebuilt_sequence(batch: list[Any] | tuple[Any, ...], moved: dict[int, Any]) -> list[Any] | tuple[Any, ...]:
    if not moved:
        return batch
    items = [moved.get(index, item) for index, item in enumerate(batch)]
    if isinstance(batch, list):
        new = copy.copy(batch)
        new[:] = items
        return new
    make = getattr(type(batch), "_make", tuple)  # a named tuple takes its fields as separate arguments
    return make(items)


def _rebuilt_dataclass(batch: Any, moved: dict[str, Any]) -> Any:
    if not moved:
        return batch
    new = copy.copy(batch)
    for name, value in moved.items():
        object.__setattr__(new, name, value)  # works for frozen dataclasses too
    return new
