"""How a run ends: an error of gloo or NCCL becomes one that names its cause."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from unishard.distributed.error_text import errors_in, text_of
from unishard.errors import RankMismatchError, UnishardError
from unishard.failures import monitor_client
from unishard.failures.rank_locations import where_raised

_NEWS = 3.0
"""Seconds to wait for the cause of a broken connection."""


_SHOWN = 300
"""Characters of a line of an error's text."""
_WORKER = "Original Traceback (most recent call last):"
_SIGNS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe")


def headline(error: BaseException) -> str:
    """An error in one line: its class, the first line of its text, and the user's line that raised it; of a group also
    the first error.
    """
    lines = text_of(error).strip().split("\n")
    text = lines[0][:_SHOWN]
    if _WORKER in lines:  # torch's text of an error in a worker of a DataLoader ends with that error
        text += f" {lines[-1][:_SHOWN]}"
    where = where_raised(error)
    line = f"{type(error).__name__}{': ' if text else ''}{text}{f' ({where})' if where else ''}"
    inner = next(errors_in(error))
    return line if inner is error else f"{line}: {headline(inner)}"


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error says that another rank could not be reached."""
    text = text_of(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError | OSError) and any(sign in text for sign in _SIGNS)
    )


def may_be_the_models(error: BaseException) -> bool:
    """Whether an error may be a model's own: it is none of ours, nor for want of memory or of another rank."""
    return not (isinstance(error, UnishardError | torch.OutOfMemoryError) or is_lost_connection(error))


@contextmanager
def explain_lost_connections() -> Iterator[None]:
    """A block in which the error of a collective becomes a RankMismatchError. It names the rank whose end has caused
    the error.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise_cause(error)
        raise


def raise_cause(error: BaseException) -> None:
    """Raise a RankMismatchError if another rank's end explains an error."""
    monitor = monitor_client.current()
    if monitor is None or isinstance(error, RankMismatchError) or not is_lost_connection(error):
        return
    if cause := monitor.cause(_NEWS):
        place = monitor.place()
        where = f" {place} and" if place.startswith("is in ") else ""
        raise RankMismatchError(f"{cause}; rank {monitor.rank}{where} cannot go on") from None
