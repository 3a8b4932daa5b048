"""Validate `native: {deepspeed: ...}` without importing DeepSpeed, which ignores an unknown key at the top level
(runtime/config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from unishard.contract.rules import Fit
from unishard.errors import Problem
from unishard_deepspeed.keys import ROWS
from unishard_deepspeed.keys.row import Row, Use

BLOCKS = [
    *dict.fromkeys(
        key[:at] for key in ROWS for at, character in enumerate(key) if character == "." and key[:at] not in ROWS
    )
]
"""Mappings whose keys have rows; every other mapping is one value."""

_FITS = {
    Use.LOG: (Fit.EQUIVALENT, "your setting; affects only logs and timers"),
    Use.SAME: (Fit.EQUIVALENT, "your setting; affects only time and memory, and results to rounding"),
    Use.OTHER: (Fit.APPROXIMATE, "only DeepSpeed has this setting; another backend trains without it"),
}


def check(native: Mapping[str, Any], prefix: str = "") -> list[Problem]:
    """Everything that is wrong with the keys a user sets, by dotted path."""
    problems: list[Problem] = []
    for name, value in native.items():
        key = f"{prefix}{name}"
        if key in BLOCKS and isinstance(value, Mapping):
            problems += check(value, f"{key}.")
        elif complaint := _complaint(key, value):
            problems.append(Problem(f"native.deepspeed.{key}", complaint))
    return problems


def fit(key: str) -> tuple[Fit, str]:
    """The fit and the note of a key that is taken, dotted; a key inside a mapping that is one value counts as that
    mapping.
    """
    parts = key.split(".")
    above = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return _FITS[next((ROWS[name].use for name in above if name in ROWS), Use.OTHER)]


def _complaint(key: str, value: Any) -> str:
    if key in BLOCKS:
        return f"must be a mapping of keys, got {type(value).__name__}; write its keys below it"
    row = ROWS.get(key)
    return _unknown(key) if row is None else row.complaint or row.values.wrong(value)


def _unknown(key: str) -> str:
    where, _, name = key.rpartition(".")
    known = [*(key for key, row in ROWS.items() if row.use is not Use.REMOVED), *BLOCKS]
    beside = {other.rpartition(".")[2]: ROWS.get(other) for other in known if other.rpartition(".")[0] == where}
    near = get_close_matches(name, beside, 1, 0.75)
    if near:
        return f"unknown to DeepSpeed 0.19.8; did you mean {_meant(near[0], beside[near[0]])}?"
    elsewhere = [other for other in known if other.rpartition(".")[2] == name]
    return f"unknown to DeepSpeed 0.19.8; {f'did you mean {elsewhere[0]!r}?' if elsewhere else 'remove it'}"


def _meant(name: str, row: Row | None) -> str:
    return f"{name!r}, which {row.text} decides" if row and row.use is Use.DECIDED else repr(name)
