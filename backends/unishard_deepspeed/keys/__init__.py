"""DeepSpeed's keys: one row for each, from which the constants, the accepted values and the check of `native.deepspeed`
follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unishard.contract.entries import NOTHING
from unishard_deepspeed.keys import top, zero
from unishard_deepspeed.keys.row import Row, Use
from unishard_deepspeed.keys.values import Takes

__all__ = ["CONSTANTS", "ROWS", "TAKES", "Row", "Use", "spellings", "used"]

ROWS: Mapping[str, Row] = {**top.TOP, **zero.ZERO}
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
