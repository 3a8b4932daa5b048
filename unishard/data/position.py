"""How far a training loader has been read, and how another run goes on from there."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch

from unishard.data.batches import length_of
from unishard.data.loader import ShareLoader
from unishard.errors import DataError

__all__ = ["LoaderPass", "Position", "StatefulLoader", "epoch_of", "of_rank", "resume"]

Position = dict[str, Any]
"""The kind of loader, the batches of its epoch that were read (0 after the last one), and the loader's own state."""

_SHARES = "unishard.dataloader"
"""The kind that any number of ranks can continue."""


@runtime_checkable
class StatefulLoader(Protocol):
    """A loader that can say where it is and go on from there: `unishard.dataloader`, torchdata's `StatefulDataLoader`."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Let the next iteration begin there."""
        ...


class LoaderPass(Iterable[Any]):
    """One pass over a training loader, from where it stands to the end of its epoch. Its length is that of what is left.

    Before the last batch that is trained on is handed out, the loader is run to its end, so that its position says that the
    epoch is over and not that nothing of it is left.
    """

    def __init__(self, loader: StatefulLoader, done: int, window: int) -> None:
        """Nothing is read yet.

        Args:
            loader: Of this rank.
            done: Batches of the epoch that were read before the loader's state was loaded.
            window: Length of the accumulation windows if an incomplete one at the end is left out, else 1.
        """
        self.before: Position | None = None
        """The position when `keep` was called last."""
        self._loader, self._done, self._window = loader, done, window

    def __len__(self) -> int:
        """Batches that are left.

        Raises:
            TypeError: The loader does not know.
        """
        if isinstance(self._loader, ShareLoader):
            return self._loader.batches_left
        length = length_of(self._loader)
        if length is None:
            raise TypeError(f"{type(self._loader).__name__} has no length")
        return max(0, length - self._done)

    def __iter__(self) -> Iterator[Any]:
        left = length_of(self)
        last = None if left is None else left - left % self._window
        batches = iter(self._loader)
        self.keep()
        for number, batch in enumerate(batches, 1):
            rest = list(islice(batches, self._window)) if number == last else []
            over = number == last and len(rest) < self._window
            self._done = 0 if over else self._done + 1 + len(rest)
            yield batch
            yield from rest
        self._done = 0

    def keep(self) -> None:
        """Remember the position, before a window is read that may not be trained on."""
        self.before = copy.deepcopy(self.position())  # a loader may hand out what it goes on to change

    def position(self) -> Position:
        """Where the loader is after the batches that it has yielded."""
        return {"loader": _kind(self._loader), "batches": self._done, "state": self._loader.state_dict()}


def _kind(loader: StatefulLoader) -> str:
    return _SHARES if isinstance(loader, ShareLoader) else type(loader).__name__


def epoch_of(position: Position) -> int | None:
    """The epoch in which a position lies, counted from 0; None where only the loader knows."""
    return position["state"]["epoch"] if position["loader"] == _SHARES else None


def of_rank(positions: Sequence[Position], world_then: int, rank: int, world_size: int) -> Position | None:
    """The position of a rank now, given those of all ranks then; None where they cannot tell."""
    if world_size == world_then:
        return positions[rank]
    return positions[0] if positions[0]["loader"] == _SHARES else None


def resume(loader: StatefulLoader, positions: Sequence[Position], world_then: int, rank: int, world_size: int) -> int:
    """Let a loader's next iteration begin where the ranks of another run were.

    Args:
        loader: Of this rank.
        positions: Of all ranks of that run.
        world_then: Ranks of that run.
        rank: This one.
        world_size: Ranks now.

    Returns:
        Batches of the epoch that this loader read in that run.

    Raises:
        DataError: The loader is of another kind, or of one that only the same number of ranks can continue.
    """
    then, now = positions[0]["loader"], _kind(loader)
    if then != now:
        raise DataError(
            f"the checkpoint's data position is that of a {then}, but training goes on with a {now}; pass engine.batches() a {then}, "
            "or load the checkpoint without its data position: engine.load(..., data=False)"
        )
    mine = of_rank(positions, world_then, rank, world_size)
    if mine is None:
        raise DataError(
            f"{now} was read by {world_then} ranks and cannot be continued by {world_size}: only the loader knows which samples are "
            f"whose; resume on {world_then} ranks, or train with unishard.dataloader, which any number of ranks can continue"
        )
    # To go on, torchdata's loader (0.11) makes an iterator, which draws a seed that an uninterrupted run has drawn long before.
    with torch.random.fork_rng(devices=[]):
        loader.load_state_dict(mine["state"])
        loader.state_dict()
    return int(mine["batches"])
