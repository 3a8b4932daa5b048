"""Curves within the bounds of the conformance suite."""

from __future__ import annotations

from unishard.testing import conformance
from unishard.testing.conformance import Cell, Tolerance
from unishard.testing.oracle import Curve


def tolerance(backend: str, strategy: str, precision: str, model: str = "mlp") -> Tolerance:
    """What the conformance suite allows this engine, its declared gaps included."""
    return conformance.tolerance(backend, Cell(model, strategy, 2, 0.5, precision, 2))


def assert_conforms(found: Curve, wanted: Curve, allowed: Tolerance) -> None:
    """Every field of the deviation is within its bound."""
    bounds = {name: getattr(allowed, name) for name in ("first_losses", "losses", "first_norm", "norms")}
    deviation = conformance.compare(found, wanted)._asdict()
    bounds["lrs"] = 1e-12
    beyond = {name: f"{value:.2g} > {bounds[name]:g}" for name, value in deviation.items() if not value <= bounds[name]}
    assert not beyond, beyond
