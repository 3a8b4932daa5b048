"""Lets a loader that is built anew over the same dataset continue with the next epoch."""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from unishard.data.loader import Cursor, ShareLoader

# -- Recognizes the same samples by a digest of their content, where it can be read without side effects --

_ELEMENTS = 2**16
"""How many elements of a tensor are read, evenly spaced."""


class _UnknownError(Exception):
    """A value of another type, whose content cannot be read without calling code of others."""


def of_dataset(dataset: Any) -> str | None:
    """A digest of a dataset's type, its length and its first and last samples; None where `dataset[0]` would run code
    of others.
    """
    try:
        ends = tuple(_ends(dataset))
    except _UnknownError:
        return None
    return of_value((type(dataset).__name__, *ends))


def _ends(dataset: Any) -> Iterator[Any]:
    kind = type(dataset)
    if kind is Subset:
        indices = dataset.indices
        if type(indices) not in (list, tuple, range):
            raise _UnknownError
        yield from (len(indices), *indices[:1000], *indices[-1:])
        yield from _ends(dataset.dataset)
    elif kind is TensorDataset:
        for tensor in dataset.tensors:
            yield from (tuple(tensor.shape), tensor[:1], tensor[-1:])
    elif kind in (list, tuple, range):
        yield from (len(dataset), *dataset[:1], *dataset[-1:])
    else:
        raise _UnknownError


def of_value(value: Any) -> str | None:
    """A digest of tensors, arrays, numbers and text in dicts, lists and tuples; None if there is anything else."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        for part in _bytes(value):
            digest.update(part)
    except _UnknownError:
        return None
    return digest.hexdigest()


def _bytes(value: Any) -> Iterator[bytes]:
    if type(value) is Tensor:
        yield from _bytes_of_tensor(value)
    elif isinstance(value, Mapping):
        yield b"{"
        for key, item in value.items():
            yield from _bytes(key)
            yield from _bytes(item)
    elif isinstance(value, list | tuple):
        yield f"[{len(value)}".encode()
        for item in value:
            yield from _bytes(item)
    elif type(value).__module__ == "numpy" and hasattr(value, "__array__"):
        try:
            yield from _bytes_of_tensor(torch.as_tensor(value))
        except TypeError:  # an array of objects
            raise _UnknownError from None
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        yield repr(value).encode(errors="replace") + b";"
    else:
        raise _UnknownError


def _bytes_of_tensor(tensor: Tensor) -> Iterator[bytes]:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise _UnknownError
    yield f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    flat = tensor.detach().resolve_conj().resolve_neg().flatten()
    flat = flat[:: max(1, flat.numel() // _ELEMENTS)].cpu().contiguous()
    yield (torch.view_as_real(flat) if flat.is_complex() else flat).view(torch.uint8).numpy().tobytes()


class _Read(NamedTuple):
    """A dataset that was trained on."""

    dataset: Callable[[], Any]
    """Returns it; None once nothing else holds it."""
    digest: str | None
    order: dict[str, Any]
    cursor: Cursor
    weak: bool


class Epochs:
    """The epochs that one engine has read of each dataset, whatever number of loaders it was read with."""

    def __init__(self) -> None:
        self._read: list[_Read] = []

    def join(self, loader: ShareLoader) -> None:
        """Let a loader that is new continue after the last one over the same dataset in the same order.

        A loader that was iterated, or that has loaded a position, keeps its own.
        """
        self._read = [read for read in self._read if read.dataset() is not None]
        same = next(
            (read for read in self._read if read.dataset() is loader.dataset and read.order == loader.order), None
        )
        if same is not None:
            self._read.remove(same)
            if loader.untouched:
                loader.continue_after(same.cursor)
            digest = same.digest
        else:
            digest = of_dataset(loader.dataset)
            if loader.untouched:
                self._warn_of_same_order(loader, digest)
        dataset, weak = _reference(loader.dataset)
        if not weak:
            self._read = [
                read for read in self._read if read.weak
            ]  # datasets that are only held for this: one at a time
        self._read.append(_Read(dataset, digest, loader.order, loader.cursor, weak))

    def forget(self) -> None:
        """Let the next loader start at its own position: another run's is resumed."""
        self._read.clear()

    def _warn_of_same_order(self, loader: ShareLoader, digest: str | None) -> None:
        if digest is None or not loader.order["shuffle"]:
            return
        if any(
            read.digest == digest and read.order == loader.order and read.cursor.next > (0, 0) for read in self._read
        ):
            warnings.warn(
                f"a new {type(loader.dataset).__name__} with the same samples as the last one starts again at epoch 0, "
                "in the same order; build the dataset once, before the loop over epochs",
                UserWarning,
                stacklevel=3,
            )


class Orders:
    """The orders in which one engine has read datasets through loaders that do not count epochs themselves."""

    def __init__(self) -> None:
        self._read: list[tuple[Callable[[], Any], Hashable, int]] = []

    def repeats(self, dataset: Any, order: Hashable, updates: int) -> bool:
        """Whether the last pass over this dataset had this order, and updates were made in it."""
        same = [read for read in self._read if read[0]() is dataset]
        dataset_, weak = _reference(dataset)
        self._read = [
            read
            for read in self._read
            if read[0]() not in (None, dataset) and (weak or isinstance(read[0], weakref.ref))
        ]
        self._read.append((dataset_, order, updates))
        return any(read[1] == order and read[2] < updates for read in same)


def _reference(dataset: Any) -> tuple[Callable[[], Any], bool]:
    """A function that returns the dataset, and whether it lets the dataset go: lists and tuples cannot be referenced
    weakly.
    """
    try:
        return weakref.ref(dataset), True
    except TypeError:
        return lambda: dataset, False
