"""What stands in a unishard file for a value that somebody must still decide: `${training.micro_batch_size}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["STAND_INS", "placeholder", "undecided_in"]

STAND_INS: Mapping[str, Any] = {"scheduler.total_steps": 2**40, "scheduler.warmup_steps": 2, "checkpoint.dir": "checkpoints"}
"""What fills the place of an undecided field that others need; every other one keeps its default."""
_PLACEHOLDER = re.compile(r"\$\{([a-z_]+(?:\.[a-z_]+)*)\}")


def placeholder(field: str) -> str:
    """What stands for a field's value."""
    return f"${{{field}}}"


def undecided_in(value: Any) -> str | None:
    """The field that a placeholder names; None for anything else."""
    found = _PLACEHOLDER.fullmatch(value) if isinstance(value, str) else None
    return found.group(1) if found else None
