"""Rows of Lightning's tables: many of its arguments say nothing at null."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Unreadable, left_out
from unishard.contract.rules import SCRIPT, Fit

TOOL = "Lightning 2.6.6"
UNSET = left_out("is not set")
ELSEWHERE = Key(lambda value, document: UNSET)
"""The row of a key that another table reads."""


def off(value: Any) -> bool:
    """Whether a value switches its key off."""
    return value is None or value is False or value in ("", "false", "False", "null", "None")


def optional(
    read: Callable[[Any, DocumentValues], KeyEffect], fields: tuple[str, ...] = (), fit: Fit = Fit.EXACT, note: str = ""
) -> Key:
    """A row that has nothing to say where the value is null."""
    return Key(lambda value, document: UNSET if value is None else read(value, document), fields, fit, note)


_DURATION = re.compile(r"(?:(\d+) days?, )?(\d+):(\d\d):(\d\d(?:\.\d+)?)")


def _timeout(value: Any, document: DocumentValues) -> KeyEffect:
    """As jsonargparse reads a timedelta; YAML makes seconds of an unquoted `1:00:00`."""
    parts = _DURATION.fullmatch(str(value))
    if parts is None and not isinstance(value, int | float):
        raise Unreadable(f'must be a duration, got {shown(value)}; write such as "1:30:00"', value)
    units = zip((86400, 3600, 60, 1), parts.groups(), strict=True) if parts else [(1, value)]
    return KeyEffect(fields={"communication.timeout": sum(unit * float(number or 0) for unit, number in units)})


TIMEOUT = optional(_timeout, ("communication.timeout",))
"""The row of every strategy that starts a process group."""


def left(why: str) -> Key:
    """A key that concerns only a launcher, a log, or files."""
    return optional(lambda value, document: left_out(why), (), Fit.IGNORED, why)


def by_script(note: str, *idle: Any) -> Key:
    """Something that the training script must do, unless the value is one of those with which there is nothing to
    do.
    """

    def read(value: Any, document: DocumentValues) -> KeyEffect:
        if off(value) or value in idle:
            return left_out("is off")
        return KeyEffect(Fit.NEEDS_INPUT, note.format(value=shown(value)))

    return optional(read, (SCRIPT,), Fit.NEEDS_INPUT, note.format(value="..."))
