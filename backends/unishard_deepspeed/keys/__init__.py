"""DeepSpeed's keys: one row for each, from which the constants, the accepted values and the check of `native.deepspeed`
follow. DeepSpeed itself ignores an unknown key at the top level (runtime/config.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from unishard.contract.entries import NOTHING
from unishard.contract.rules import Fit
from unishard.errors import Problem
from unishard_deepspeed.keys import top
from unishard_deepspeed.keys.row import Row, Takes, Use

__all__ = ["CONSTANTS", "ROWS", "TAKES", "Row", "Use", "check", "fit", "spellings", "used"]

ROWS: Mapping[str, Row] = {**top.TOP, **top.ZERO}
"""All that unishard knows of each key, dotted."""

CONSTANTS: Mapping[str, tuple[Any, str]] = {
    key: (row.constant, row.why) for key, row in ROWS.items() if row.constant is not NOTHING
}
"""What is written whatever the config says, and why: nothing is left to a default that changes."""


def used(*uses: Use) -> dict[str, Row]:
    """The rows that are used so."""
    return {key: row for key, row in ROWS.items() if row.use in uses}


def spellings(key: str) -> Iterator[str]:
    """The key, and the other name that DeepSpeed has for it."""
    yield key
    # stage3_gather_fp16_weights_on_model_save has no other name
    if ".stage3_" in key and ROWS[key].use is not Use.REFUSED:
        yield key.replace("stage3_", "")
    if key.startswith("bf16."):
        yield f"bfloat16.{key.removeprefix('bf16.')}"


TAKES: Mapping[str, Takes] = {
    name: row.values.takes for key, row in ROWS.items() if row.values.takes for name in spellings(key)
}
"""What DeepSpeed takes for a key, in each spelling; it does not look at the value of any other."""


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
        elif what := _complaint(key, value):
            problems.append(Problem(f"native.deepspeed.{key}", what))
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
