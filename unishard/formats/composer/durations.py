"""Composer's times, such as `100ba`, `1ep` and `0.02dur` (composer.core.Time), in updates."""

from __future__ import annotations

import re
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import DocumentValues, Undecided, Unreadable

__all__ = ["updates"]

_TIME = re.compile(r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*(ba|ep|dur|tok|sp|sec|iter)\s*")
_UNITS = {
    "ep": "the length of the data: {text} are epochs",
    "tok": "the tokens in a batch: {text} are tokens",
    "sp": "the batch size: {text} are samples",
    "sec": "the speed of the training: {text} are seconds",
    "iter": "the length of an iteration: {text} are iterations",
}


def updates(value: Any, given: DocumentValues) -> int | Undecided:
    """A time in updates; undecided where the data decides it.

    Raises:
        Unreadable: It is no time.
    """
    found = _TIME.fullmatch(value) if isinstance(value, str) else None
    if isinstance(value, int) and not isinstance(value, bool):
        # Composer takes a bare number for epochs.
        return Undecided(_UNITS["ep"].format(text=value))
    if not found:
        raise Unreadable(f"must be a time, got {shown(value)}; write one such as 100ba for 100 updates")
    amount, unit = float(found.group(1)), found.group(2)
    if unit == "ba":
        return int(amount)
    if unit == "dur":
        whole = given.get("max_duration")
        if whole is None:
            return Undecided(f"max_duration, which the file does not have: {value} is a fraction of it")
        if str(whole).strip().endswith("dur"):
            raise Unreadable(f"must be in batches if max_duration is a fraction, got {shown(value)}; write 100ba")
        total = updates(whole, given)
        return total if isinstance(total, Undecided) else int(amount * total)
    return Undecided(_UNITS[unit].format(text=value))
