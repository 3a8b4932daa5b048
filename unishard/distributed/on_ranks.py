"""Runs code on the first rank or on every rank.

An error on one rank is raised on all of them, so that no rank deadlocks.

A KeyboardInterrupt or SystemExit stays what it is on its own rank; on the others it is an error that names that rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from unishard.distributed.error_text import text_of
from unishard.distributed.interrupts import share
from unishard.errors import CheckpointError, UnishardError

T = TypeVar("T")


def on_first(group: dist.ProcessGroup | None, act: Callable[[], T]) -> T:
    """Run a function on the first rank and return its result on all ranks. Collective.

    Args:
        group: A process group with a CPU backend.
        act: Returns something small that can be pickled.

    Raises:
        CheckpointError: On every rank, if the function failed.
    """
    answer: list[Any] = [None, None]
    error: BaseException | None = None
    if dist.get_rank(group) == 0:
        answer[0], error = _attempt(act)
        answer[1] = f"rank 0: {_message(error)}" if _is_interrupt(error) else _message(error)
    dist.broadcast_object_list(answer, group=group, group_src=0)
    _raise_interrupt(error)
    if answer[1] is not None:
        raise CheckpointError(answer[1]) from _shown(error)
    return answer[0]  # type: ignore[no-any-return]


def on_all(group: dist.ProcessGroup | None, act: Callable[[], T]) -> T:
    """Run a function on every rank. Collective.

    Returns:
        This rank's result.

    Raises:
        CheckpointError: On every rank, if the function failed on any; quotes the first rank that failed.
    """
    result, error = _attempt(act)
    _raise_failed(ranks_of(group).gather(_message(error)), error)
    return result  # type: ignore[return-value]


class Ranks(NamedTuple):
    """This rank among those that take part; by default a single process."""

    rank: int = 0
    world: int = 1
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    """All ranks' values, in rank order. Collective."""

    def each(self, act: Callable[[], T]) -> list[T]:
        """Run a function on every rank. Collective: returns once all ranks are done.

        Returns:
            All ranks' results, in rank order.

        Raises:
            CheckpointError: On every rank, if it failed on any. A rank raises an error of another kind as it is.
        """
        result, error = _attempt(act)
        outcomes = self.gather((result, _message(error)))
        if error is not None and not isinstance(error, CheckpointError | OSError) and not _is_interrupt(error):
            raise error
        _raise_failed([message for _, message in outcomes], error)
        return [value for value, _ in outcomes]


def ranks_of(group: dist.ProcessGroup | None) -> Ranks:
    """The ranks of a group, or of the default one; a single process where no process group is initialized."""
    if not dist.is_initialized():
        return Ranks()
    world = dist.get_world_size(group)

    def gather(value: Any) -> list[Any]:
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, value, group=group)
        return everyone

    return Ranks(dist.get_rank(group), world, gather)


def _attempt(act: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return act(), None
    except BaseException as error:  # any: the other ranks must hear of it, or they deadlock
        return None, error


def _raise_failed(messages: Sequence[str | None], error: BaseException | None) -> None:
    """Raise what any rank has failed with, in the same words on all, so that a launcher shows it once."""
    _raise_interrupt(error)
    failed = [
        f"rank {rank}: {message}" if len(messages) > 1 else message
        for rank, message in enumerate(messages)
        if message is not None
    ]
    if failed:
        others = f" (and {len(failed) - 1} other ranks failed)" if len(failed) > 1 else ""
        raise CheckpointError(failed[0] + others) from _shown(error)


def _is_interrupt(error: BaseException | None) -> bool:
    return error is not None and not isinstance(error, Exception)


def _raise_interrupt(error: BaseException | None) -> None:
    """Raise what is no error of the call, after the other ranks have heard of it."""
    if error is not None and _is_interrupt(error):
        raise share(error)


def _shown(error: BaseException | None) -> BaseException | None:
    """The error whose traceback is shown as the cause: none where the message says all."""
    return None if isinstance(error, UnishardError | OSError) else error


def _message(error: BaseException | None) -> str | None:
    if error is None or isinstance(error, UnishardError):
        return None if error is None else str(error)
    if _is_interrupt(error):
        return f"interrupted by {type(error).__name__}"
    return f"{type(error).__name__}: {text_of(error)}"
