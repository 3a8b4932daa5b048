"""How far an engine may be from plain torch, and where upstream keeps one from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["GAPS", "TOLERANCES", "KnownGap", "Tolerance"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far an engine may be from the oracle; all but the learning rate are relative."""

    first_losses: float
    """Of the first three losses: before one flipped rounding can have grown."""
    losses: float
    """Of all losses."""
    first_norm: float
    """Of the first gradient norm."""
    norms: float
    """Of all gradient norms."""
    why: str


TOLERANCES = {
    "fp32": Tolerance(1e-6, 1e-6, 1e-5, 1e-5, "only the order of fp32 sums differs"),
    "bf16": Tolerance(
        1e-6,
        5e-3,
        1e-6,
        2e-2,
        "the first updates are the same to fp32 rounding; later a difference of 1e-7 flips one bf16 rounding, and that grows",
    ),
    "fp16": Tolerance(1e-5, 5e-3, 1e-5, 2e-2, "as in bf16; sums of fp16 gradients in another order differ a little more"),
}
"""By compute format."""


class KnownGap(NamedTuple):
    """Cells in which an engine cannot keep the common tolerance, and what it keeps instead."""

    backend: str
    model: str
    strategy: str
    precision: str
    tolerance: Tolerance
    link: str
    """Where upstream it is known."""


GAPS: tuple[KnownGap, ...] = ()
