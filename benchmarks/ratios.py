"""Two sides beside each other: medians of paired ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["paired", "ranged"]


def paired(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """The median of the ratios of steps of the same round, with its 95 % interval (order statistics, no distribution
    assumed).
    """
    ratios = sorted(own / other for own, other in zip(ours, theirs, strict=True))
    margin = 1.96 * math.sqrt(len(ratios)) / 2
    low, high = (ratios[min(len(ratios) - 1, max(0, round(len(ratios) / 2 + sign * margin)))] for sign in (-1, 1))
    return {"ratio": statistics.median(ratios), "low": low, "high": high, "pairs": len(ratios)}


def ranged(found: Mapping[str, Any], digits: int) -> str:
    """A ratio with its interval."""
    ratio, low, high = (f"{found[name]:.{digits}f}" for name in ("ratio", "low", "high"))
    return f"{ratio} ({low} to {high})"
