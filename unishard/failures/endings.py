"""How a run ends: errors of gloo and NCCL become those of their cause."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from unishard.distributed.error_text import errors_in, text_of
from unishard.errors import RankMismatchError
from unishard.failures import monitor_client
from unishard.failures.rank_locations import where_raised

_NEWS = 3.0
"""Seconds to wait for the cause of a broken connection."""


_SHOWN = 300
"""Characters of a line of an error's text."""
_WORKER = "Original Traceback (most recent call last):"
_SIGNS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe")

C = TypeVar("C", bound=type)


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


@contextmanager
def naming_causes() -> Iterator[None]:
    """A block in which the error of a collective becomes a RankMismatchError that names the rank whose end has caused
    it.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        _raise_cause(error)
        raise


def names_causes(cls: C) -> C:
    """Run each public method of a class, also the inherited ones, in a block of `naming_causes`."""
    return wrap_methods(cls, _naming)


def wrap_methods(cls: C, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> C:
    """Replace each public method of a class, also the inherited ones, but no generator."""
    for name in dir(cls):
        method = getattr(cls, name)
        if (
            inspect.isfunction(method)
            and not inspect.isgeneratorfunction(method)
            and (name == "__call__" or not name.startswith("_"))
        ):
            setattr(cls, name, wrapped(method))
    return cls


def _naming(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except (RuntimeError, OSError) as error:
            _raise_cause(error)
            raise

    return named


def _raise_cause(error: BaseException) -> None:
    """Raise a RankMismatchError if another rank's end explains an error."""
    line = monitor_client.current()
    if line is None or isinstance(error, RankMismatchError) or not is_lost_connection(error):
        return
    if cause := line.cause(_NEWS):
        place = line.place()
        where = f" {place} and" if place.startswith("is in ") else ""
        raise RankMismatchError(f"{cause}; rank {line.rank}{where} cannot go on") from None
