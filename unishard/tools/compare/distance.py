"""How far two runs of the same steps are from each other. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from unishard.contract.tolerances import Tolerance
from unishard.tools.compare.records import Course

_FIRST = 3
"""Losses that `Tolerance.first_losses` bounds."""
_RATES = 1e-6
"""Relative difference of learning rates that is rounding."""


class Distance(NamedTuple):
    """The largest relative differences over all common steps; None where a value is missing."""

    loss: float | None
    norm: float | None
    steps: int


class Divergence(NamedTuple):
    """The first value beyond its tolerance."""

    step: int
    name: str
    """`loss`, `grad_norm` or `lr`."""
    found: float | None
    expected: float | None
    allowed: float

    @property
    def relative(self) -> float:
        """The relative difference."""
        return relative(self.found, self.expected)


def relative(one: float | None, other: float | None) -> float:
    """The relative difference; None is NaN or infinite, which equals only itself."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    return abs(one - other) / max(abs(other), 1e-12)


def distance_to(found: Course, expected: Course) -> Distance:
    """Compare all common steps."""
    pairs = list(_pairs(found, expected))
    losses = [relative(found.losses[one], expected.losses[other]) for one, other in pairs]
    norms = [
        relative(found.norms[one], expected.norms[other]) for one, other in pairs if expected.norms[other] is not None
    ]
    return Distance(max(losses, default=None), max(norms, default=None), len(pairs))


def first_divergence(found: Course, expected: Course, tolerance: Tolerance) -> Divergence | None:
    """The first value beyond its tolerance, by step and then loss, norm, learning rate; None if there is none."""
    for turn, (one, other) in enumerate(_pairs(found, expected)):
        values = (
            (
                "loss",
                found.losses[one],
                expected.losses[other],
                tolerance.first_losses if turn < _FIRST else tolerance.losses,
            ),
            ("grad_norm", found.norms[one], expected.norms[other], tolerance.norms if turn else tolerance.first_norm),
            ("lr", found.lrs[one], expected.lrs[other], _RATES),
        )
        for name, left, right, allowed in values:
            # A golden file may lack norms and rates.
            if not (name != "loss" and right is None) and relative(left, right) > allowed:
                return Divergence(found.steps[one], name, left, right, allowed)
    return None


def _pairs(found: Course, expected: Course) -> Iterator[tuple[int, int]]:
    """Positions of the common steps in both."""
    at = {step: position for position, step in enumerate(expected.steps)}
    return ((position, at[step]) for position, step in enumerate(found.steps) if step in at)
