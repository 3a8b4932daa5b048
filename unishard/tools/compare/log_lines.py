"""Lines that a run has logged, from a file that may be damaged or written by something else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

_LARGEST = 2**63
"""No step and no value is as large."""
_NAMES = ("module", "parameter")
"""What is text."""


def lines_in(text: str) -> Iterator[dict[str, Any]]:
    """The lines with a step, whose other values are numbers; others, such as a last half one, are left out."""
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if (
            isinstance(record, dict)
            and isinstance(record.get("step"), int)
            and all(map(_is_sound, record, record.values()))
        ):
            yield record


def _is_sound(name: str, value: Any) -> bool:
    if name in _NAMES:
        return isinstance(value, str)
    if isinstance(value, float):
        return not math.isinf(value)
    return value is None or (isinstance(value, int) and abs(value) < _LARGEST)
