"""Placeholders in a unishard file for values that still need a decision: `${training.micro_batch_size}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["STAND_INS", "placeholder", "undecided_in"]

STAND_INS: Mapping[str, Any] = {"scheduler.total_steps": 2**40, "scheduler.warmup_steps": 2, "checkpoint.dir": "checkpoints"}
"""Temporary values of undecided fields that others depend on; any other field keeps its default."""
_PLACEHOLDER = re.compile(r"\$\{([a-z_]+(?:\.[a-z_]+)*)\}")


def placeholder(field: str) -> str:
    """The placeholder of a field."""
    return f"${{{field}}}"


def undecided_in(value: Any) -> str | None:
    """The field of a placeholder; None for anything else."""
    found = _PLACEHOLDER.fullmatch(value) if isinstance(value, str) else None
    return found.group(1) if found else None
