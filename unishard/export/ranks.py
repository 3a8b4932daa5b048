"""Ranks that do something together, where an error on one is an error on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from unishard.errors import CheckpointError, UnishardError

__all__ = ["Ranks", "ranks_of"]

T = TypeVar("T")


class Ranks(NamedTuple):
    """This rank among all that take part; by default one process alone."""

    rank: int = 0
    world: int = 1
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    """Everyone's value in the order of ranks. Collective."""

    def each(self, work: Callable[[], T]) -> list[T]:
        """Do something on every rank. Collective: nobody goes on before all are done.

        Returns:
            Everyone's result, in the order of ranks.

        Raises:
            CheckpointError: It failed on another rank. A rank on which it failed raises its own error.
        """
        mine: T | None = None
        problem: Exception | None = None
        try:
            mine = work()
        except Exception as error:  # whatever it is, the others must not wait for this rank
            problem = error
        everyone = self.gather((mine, None if problem is None else _said(problem)))
        if problem is not None:
            raise problem
        failed = next((f"rank {rank}: {said}" for rank, (_, said) in enumerate(everyone) if said is not None), None)
        if failed is not None:
            raise CheckpointError(failed)
        return [result for result, _ in everyone]


def ranks_of(group: dist.ProcessGroup | None) -> Ranks:
    """The ranks of a group, or of the default one; this process alone where there is none."""
    if not dist.is_initialized():
        return Ranks()
    world = dist.get_world_size(group)

    def gather(value: Any) -> list[Any]:
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, value, group=group)
        return everyone

    return Ranks(dist.get_rank(group), world, gather)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, UnishardError) else f"{type(error).__name__}: {error}"
