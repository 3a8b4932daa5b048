"""Where each rank is: for the messages of `unishard.failures.collective_check`, and to find deadlocks."""

from __future__ import annotations

import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from unishard.failures.collective_frames import group_of

_ENGINE = str(Path(__file__).parents[1] / "engine")
"""On the stack of every call of an engine."""
_PACKAGE = str(Path(__file__).parents[1])
_BACKENDS = str(Path(__file__).parents[2] / "backends")
"""In a checkout; installed, backends are among the packages."""
_WRITING = str(Path(__file__).parents[1] / "checkpoint")
_STDLIB = sysconfig.get_path("stdlib")
_INSTALLED = tuple(
    {
        sysconfig.get_path("stdlib"),
        *(sysconfig.get_path(name) for name in ("purelib", "platlib")),
        str(Path(torch.__file__).parents[1]),
    }
)

_OF_SEVERAL = {"is": "are", "has": "have", "waits": "wait", "enters": "enter"}
_VERBS = re.compile(r"^(is|has|waits|enters)\b|(?<=, )waits(?= in torch)|(?<= and )(is(?= in )|has(?= closed ))")


def describe(places: Mapping[int, str], silent: Iterable[int], last: str) -> str:
    """A list of ranks by place, then the ranks that gave no answer, with the last place common to all."""
    together: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        together.setdefault(place, []).append(rank)
    lines = [f"{_ranks(ranks)} {_of_several(place) if len(ranks) > 1 else place}" for place, ranks in together.items()]
    if missing := sorted(silent):
        lines.append(
            f"{_ranks(missing)} {'is' if len(missing) == 1 else 'are'} gone or gave no answer, last seen "
            f"{last.partition(' ')[2]}"
        )
    return "; ".join(lines)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def _of_several(place: str) -> str:
    return _VERBS.sub(lambda verb: _OF_SEVERAL[verb[0]], place)


class Location(NamedTuple):
    """Where a thread of this process is."""

    text: str
    """`file:line in function` of the innermost frame of the user's code."""
    inside: bool
    """Whether it is in a call of an engine."""
    group: tuple[int, ...] | None
    """The ranks that it waits for in a collective, empty for all; None if it is not in a collective."""


def where_is(thread: int) -> Location:
    """Where a thread of this process is."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return Location("nowhere: its thread has ended", False, None)
    frames = traceback.extract_stack(frame)
    return Location(_in_words(frames), _is_inside(frames), group_of(frame))


def has_other_threads(thread: int) -> bool:
    """Whether a thread other than this one and the given one runs code of the user, which may join collectives too."""
    others = [
        frame
        for identifier, frame in sys._current_frames().items()
        if identifier not in (thread, threading.get_ident())
    ]
    return any(_is_users(entry) for frame in others for entry in traceback.extract_stack(frame))


def may_wait_for_ranks(thread: int, *, surely: bool) -> bool:
    """Whether a thread that stands still may be in a collective, and not in other work such as writing a checkpoint.

    Args:
        thread: Its identifier.
        surely: Whether to leave out calls of an engine that may as well compute: those that wait in C++ or for a
            device.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return False
    if group_of(frame) is not None:
        return True
    frames = traceback.extract_stack(frame)
    names = [entry.filename for entry in frames]
    in_python = names[-1].startswith(_STDLIB) and "-packages" not in names[-1]  # a lock, a file, another process
    return not surely and not in_python and _is_inside(frames) and not any(name.startswith(_WRITING) for name in names)


def position_of(thread: int) -> tuple[int, ...]:
    """The instruction at which each frame of a thread is: equal twice if the thread has not moved, or is back where it
    was.
    """
    frame, position = sys._current_frames().get(thread), []
    while frame is not None:
        position += [id(frame), frame.f_lasti]
        frame = frame.f_back
    return tuple(position)


def where_raised(error: BaseException) -> str:
    """`file:line in function` of the user's code that raised an error, or whose call raised it; empty for an error that
    was not raised.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return _in_words(frames) if frames else ""


def _in_words(frames: traceback.StackSummary) -> str:
    entry = ([entry for entry in frames if _is_users(entry)] or frames)[-1]
    return f"{Path(entry.filename).name}:{entry.lineno} in {entry.name}"


def _is_users(entry: traceback.FrameSummary) -> bool:
    return not entry.filename.startswith((_PACKAGE, _BACKENDS, "<", *_INSTALLED))


def _is_inside(frames: traceback.StackSummary) -> bool:
    return any(entry.filename.startswith(_ENGINE) for entry in frames)
