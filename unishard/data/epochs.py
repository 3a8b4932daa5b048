"""Lets a loader that is built anew over the same dataset continue with the next epoch."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from unishard.data.digest import of_dataset
from unishard.data.loader import Cursor, ShareLoader


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
        dataset, weak = reference(loader.dataset)
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
        dataset_, weak = reference(dataset)
        self._read = [
            read
            for read in self._read
            if read[0]() not in (None, dataset) and (weak or isinstance(read[0], weakref.ref))
        ]
        self._read.append((dataset_, order, updates))
        return any(read[1] == order and read[2] < updates for read in same)


def reference(dataset: Any) -> tuple[Callable[[], Any], bool]:
    """A function that returns the dataset, and whether it lets the dataset go: lists and tuples cannot be referenced
    weakly.
    """
    try:
        return weakref.ref(dataset), True
    except TypeError:
        return lambda: dataset, False
