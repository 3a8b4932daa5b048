"""How far an engine may deviate from plain torch, and two engines from each other. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Maximum relative deviation of an engine from the oracle."""

    first_losses: float
    """For the first three losses, before a flipped rounding can grow."""
    losses: float
    """For all losses."""
    first_norm: float
    """For the first gradient norm."""
    norms: float
    """For all gradient norms."""
    why: str


TOLERANCES = {
    "fp32": Tolerance(1e-6, 1e-6, 1e-5, 1e-5, "only the order of fp32 sums differs"),
    "bf16": Tolerance(
        1e-6,
        5e-3,
        1e-6,
        2e-2,
        "the first updates are the same to fp32 rounding; later a difference of 1e-7 flips one bf16 rounding, and that "
        "grows",
    ),
    "fp16": Tolerance(
        1e-5, 5e-3, 1e-5, 2e-2, "as in bf16; sums of fp16 gradients in another order differ a little more"
    ),
}
"""By compute dtype."""
