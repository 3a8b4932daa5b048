"""Placeholders in a unishard file for values that still need a decision: `${training.micro_batch_size}`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from unishard.config import Config
from unishard.config.section import needs_of

STAND_INS: Mapping[str, Any] = {
    "scheduler.total_steps": 2**40,
    "scheduler.warmup_steps": 2,
    "checkpoint.dir": "checkpoints",
}
"""Temporary values of undecided fields that others depend on; any other field keeps its default."""

Switches = Mapping[str, tuple[Any, ...]]
"""Fields, one of which must have one of these values."""

_OF_COMPUTE = ("precision.master", "precision.reduce", "precision.accumulate")
_PLACEHOLDER = re.compile(r"\$\{([a-z0-9_]+(?:\.[a-z0-9_]+)*)\}")


def placeholder(field: str) -> str:
    """The placeholder of a field."""
    return f"${{{field}}}"


def undecided_in(value: Any) -> str | None:
    """The field of a placeholder; None for anything else."""
    match = _PLACEHOLDER.fullmatch(value) if isinstance(value, str) else None
    return match.group(1) if match else None


def needs(field: str, value: Any) -> list[Switches]:
    """What a value of a field needs, all of it, without which the schema refuses it; nothing where no values are
    listed.
    """
    if field in _OF_COMPUTE and value in ("bf16", "fp16"):
        return [{"precision.compute": (value,)}]
    return [need.listed for need in needs_of(Config).get(field, ()) if need.refusal and need.listed]


def stand_ins(values: Mapping[str, Any], undecided: Collection[str]) -> dict[str, Any]:
    """A value for each undecided field that others depend on, so that what is decided about these can be kept.

    Args:
        values: The decided fields.
        undecided: The others, which the user must decide.
    """
    stand_in_values = {field: value for field, value in STAND_INS.items() if field in undecided}
    for field, value in (stand_in_values | dict(values)).items():
        for wanted in needs(field, value) if value is not None else ():
            met = any(values.get(switch) in accepted for switch, accepted in wanted.items())
            switch = next((switch for switch in wanted if switch in undecided), None)
            if switch and not met:
                stand_in_values.setdefault(switch, wanted[switch][0])
    return stand_in_values
