"""What one rank does for all, or every rank for itself: a failure anywhere is the same error everywhere, and no rank is left waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from unishard.errors import CheckpointError

__all__ = ["on_all", "on_first"]

T = TypeVar("T")


def on_first(group: dist.ProcessGroup | None, act: Callable[[], T]) -> T:
    """Let the first rank act, and all have what it returns. Collective.

    Args:
        group: Of a backend for the CPU.
        act: Returns something small that can be pickled.

    Raises:
        CheckpointError: On every rank, if it failed.
    """
    answer: list[Any] = [None, None]
    own: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            answer[0] = act()
        except Exception as error:  # whatever it is, the others must not wait for ever
            answer[1] = _words(error)
            own = error
    dist.broadcast_object_list(answer, group=group, group_src=0)
    if answer[1] is not None:
        raise CheckpointError(answer[1]) from own
    return answer[0]  # type: ignore[no-any-return]


def on_all(group: dist.ProcessGroup | None, act: Callable[[], T]) -> T:
    """Let every rank act. Collective.

    Returns:
        What it returned on this rank.

    Raises:
        CheckpointError: On every rank, if it failed on one of them; names the first.
    """
    own: Exception | None = None
    try:
        result = act()
    except Exception as error:  # as above
        own = error
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, None if own is None else _words(own), group=group)
    failed = [(rank, words) for rank, words in enumerate(everyone) if words is not None]
    if failed:
        rank, words = failed[0]
        others = f" (and {len(failed) - 1} other ranks failed)" if len(failed) > 1 else ""
        raise CheckpointError(f"rank {rank}: {words}{others}" if len(everyone) > 1 else words) from own
    return result


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
