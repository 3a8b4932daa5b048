"""Tracks the position of a training loader, and resumes from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch

from unishard.config.describe import count_of
from unishard.data import torch_loader
from unishard.data.batches import length_of
from unishard.data.loader import ShareLoader, is_count
from unishard.data.torch_loader import TorchLoader
from unishard.errors import DataError

Position = dict[str, Any]
"""The kind of loader, the number of batches read in its epoch (0 after the last one), and the loader's own state."""

_SHARES = "unishard.dataloader"
"""The only kind that can be resumed on another number of ranks."""


@runtime_checkable
class StatefulLoader(Protocol):
    """A loader that can save and restore its position: `unishard.dataloader`, torchdata's `StatefulDataLoader`."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]:
        """The current position."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Make the next iteration begin at this position."""
        ...


def is_stateful(loader: Iterable[Any]) -> TypeGuard[StatefulLoader]:
    """Whether a loader has a position.

    Accelerate's have the methods, but without `use_stateful_dataloader` they raise (1.15).
    """
    return isinstance(loader, StatefulLoader) and bool(getattr(loader, "use_stateful_dataloader", True))


def with_position(loader: Iterable[Any], inner: Iterable[Any]) -> StatefulLoader | None:
    """A loader as one that has a position; None if it has none.

    Args:
        loader: What a loop reads.
        inner: The loader in it.
    """
    if is_stateful(inner):
        return inner
    return TorchLoader(inner) if loader is inner and TorchLoader.fits(inner) else None  # type: ignore[arg-type]


class LoaderPass(Iterable[Any]):
    """One pass over a training loader, from its position to the end of its epoch.

    Its length is the number of batches left.

    Before the last batch for training is yielded, the loader is exhausted, so that its position is the start of the
    next epoch and not the end of this one.
    """

    def __init__(
        self, loader: StatefulLoader, done: int, used: Callable[[int], int], around: Iterable[Any] | None = None
    ) -> None:
        """Create a pass; nothing is read yet.

        Args:
            loader: This rank's loader.
            done: Batches of the epoch that were read before the loader's state was loaded.
            used: Of so many batches, those that are trained on; the others, of an incomplete last window, are dropped.
            around: What reads the loader and yields its batches, such as a progress bar; by default nothing does.
        """
        self.before: Position | None = None
        """The position at the last call of `keep`."""
        self.exact = True
        """Whether what is around the loader has yielded each batch as soon as it was read."""
        self._loader, self._done, self._used = loader, done, used
        self._around = loader if around is None else around

    @property
    def name(self) -> str:
        """The class of what is read."""
        return type(self._around).__name__

    def __len__(self) -> int:
        """Batches left.

        Raises:
            TypeError: The loader does not know.
        """
        length = batches_left(self._loader)
        if length is None:
            raise TypeError(f"{self.name} has no length")
        return max(0, length - (0 if isinstance(self._loader, ShareLoader) else self._done))

    def __iter__(self) -> Iterator[Any]:
        left = length_of(self)
        before = self._loader.yielded if isinstance(self._loader, ShareLoader) else 0
        batches = iter(self._around)
        self.keep()
        for number, batch in enumerate(batches, 1):
            dropped = -1 if left is None or number != self._used(left) else left - number
            rest = list(islice(batches, dropped + 1))
            if isinstance(self._loader, ShareLoader):
                self.exact = self.exact and self._loader.yielded - before == number + len(rest)
            over = len(rest) <= dropped
            self._done = 0 if over else self._done + 1 + len(rest)
            yield batch
            yield from rest
        self._done = 0

    def keep(self) -> None:
        """Save the position at the beginning."""
        self.before = self.position()

    def rewind(self) -> None:
        """Let the next pass over a `unishard.dataloader` begin where this one did."""
        if isinstance(self._loader, ShareLoader) and self.before is not None:
            self._loader.load_state_dict(self.before["state"])

    def position(self) -> Position | None:
        """The loader's position after the batches that it has yielded; None if it is not `exact`."""
        position = {"loader": _kind(self._loader), "batches": self._done, "state": self._loader.state_dict()}
        return copy.deepcopy(position) if self.exact else None  # a loader may return state that it modifies later


def batches_left(loader: Iterable[Any]) -> int | None:
    """Batches that the next iteration of a loader yields, at its own position; None if unknown."""
    return loader.batches_left if isinstance(loader, ShareLoader) else length_of(loader)


def left_after(
    loader: StatefulLoader, positions: Sequence[Position], world_then: int, rank: int, world_size: int
) -> int | None:
    """Batches that are left after `resume` with the same arguments; None if unknown."""
    where = of_rank(positions, world_then, rank, world_size)
    if (
        where is None
        or where["loader"] != _kind(loader)
        or starts_over(loader, positions, world_then, rank, world_size)
    ):
        return batches_left(loader)
    if isinstance(loader, ShareLoader):
        return loader.batches_after(where["state"]["samples"])
    length = length_of(loader)
    return None if length is None else max(0, length - int(where["batches"]))


def _kind(loader: StatefulLoader) -> str:
    if isinstance(loader, TorchLoader):
        return torch_loader.KIND
    return _SHARES if isinstance(loader, ShareLoader) else type(loader).__name__


def starts_over(
    loader: StatefulLoader, positions: Sequence[Position], world_then: int, rank: int, world_size: int
) -> str | None:
    """Why a loader begins at its beginning, whatever position was saved, as a `DataLoader` may; None if it resumes."""
    kinds = {positions[0]["loader"], _kind(loader)}
    if torch_loader.KIND not in kinds:
        return None
    if len(kinds) > 1:
        return f"the checkpoint's data position is for a {positions[0]['loader']}, and this run uses a {_kind(loader)}"
    mine = of_rank(positions, world_then, rank, world_size)
    if mine is None:
        return f"it was saved on {count_of(world_then, 'rank')}"
    now = loader.identity() if isinstance(loader, TorchLoader) else {}
    changed = [
        f"{name} was {mine['state'].get(name)}, is {value}"
        for name, value in now.items()
        if mine["state"].get(name) != value
    ]
    return "; ".join(changed) or None


def is_position(value: object) -> bool:
    """Whether this is a position, or the None of a rank that had none."""
    if not isinstance(value, dict):
        return value is None
    kind, batches, state = (value.get(name) for name in ("loader", "batches", "state"))
    sound = isinstance(kind, str) and is_count(batches) and {"loader", "batches", "state"} == value.keys()
    if kind == torch_loader.KIND:
        return sound and torch_loader.is_state(state)
    return sound and (kind != _SHARES or (isinstance(state, dict) and is_count(state.get("epoch"))))


def epoch_of(position: Position) -> int | None:
    """The epoch of a position, counted from 0; None if only the loader knows."""
    return position["state"]["epoch"] if position["loader"] == _SHARES else None


def of_rank(positions: Sequence[Position], world_then: int, rank: int, world_size: int) -> Position | None:
    """The position for a rank of this run, given those of all ranks of the saved run; None if it cannot be derived."""
    if world_size == world_then:
        return positions[rank]
    return positions[0] if positions[0]["loader"] == _SHARES else None


def resume(loader: StatefulLoader, positions: Sequence[Position], world_then: int, rank: int, world_size: int) -> int:
    """Resume a loader at the position of a saved run.

    Args:
        loader: This rank's loader.
        positions: The positions of all ranks of the saved run.
        world_then: World size of the saved run.
        rank: This rank.
        world_size: World size of this run.

    Returns:
        Batches of the epoch that this loader read in the saved run.

    Raises:
        DataError: The loader is of another kind, or of one that can only be resumed on the same number of ranks.
    """
    then, now = positions[0]["loader"], _kind(loader)
    if then != now:
        raise DataError(
            f"the checkpoint's data position is for a {then}, but this run uses a {now}; pass a {then} to "
            "engine.batches(), or load the checkpoint without its data position: engine.load(..., data=False)"
        )
    mine = of_rank(positions, world_then, rank, world_size)
    if mine is None:
        saved_on = count_of(world_then, "rank")
        raise DataError(
            f"{now} was saved on {saved_on} and cannot be resumed on {world_size}, since only the loader knows which "
            "rank reads which "
            f"samples; resume on {saved_on}, or train with unishard.dataloader, which resumes on any number of ranks"
        )
    # To resume, torchdata's loader (0.11) creates an iterator, which draws a seed that an uninterrupted run drew long
    # before.
    with torch.random.fork_rng(devices=[]):
        loader.load_state_dict(mine["state"])
        loader.state_dict()
    return int(mine["batches"])
