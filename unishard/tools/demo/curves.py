"""The results of a run of the example, and the difference between two runs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Self


@dataclass(frozen=True, slots=True)
class TrainingCurve:
    """One run of `examples/train_llama.py`, from its JSON file."""

    backend: str
    ranks: int
    losses: list[float]
    """Mean loss over all ranks, one for each update."""
    grad_norms: list[float]
    """Global norm before clipping, one for each update."""
    step_seconds: list[float]
    """Time of each update; the first one includes lazy initialization."""
    peak_memory_bytes: list[int]
    """One for each rank."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the JSON file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    @property
    def median_step_seconds(self) -> float:
        """Typical time of an update."""
        return median(self.step_seconds)


@dataclass(frozen=True, slots=True)
class CurveGap:
    """The difference of two curves at one update."""

    step: int
    """The update, counted from 1."""
    absolute: float
    relative: float
    """The difference divided by the first curve's loss."""

    @classmethod
    def each(cls, one: TrainingCurve, other: TrainingCurve) -> list[Self]:
        """The difference of two curves of the same length at every update."""
        pairs = zip(one.losses, other.losses, strict=True)
        return [cls(step, abs(a - b), abs(a - b) / abs(a) if a else abs(a - b)) for step, (a, b) in enumerate(pairs, 1)]

    @classmethod
    def between(cls, one: TrainingCurve, other: TrainingCurve) -> Self:
        """The largest relative difference; one that is not a number counts as the largest."""
        return max(cls.each(one, other), key=lambda gap: math.inf if math.isnan(gap.relative) else gap.relative)
