"""Holds runs of a few accumulation windows to the oracle, with the tolerances of the conformance suite."""

from __future__ import annotations

from typing import Any

from playing import config, everyones

from unishard.config import Config
from unishard.testing import conformance
from unishard.testing.conformance import Cell, Tolerance
from unishard.testing.oracle import Curve

ACCUMULATION, UPDATES = 2, 3
MICRO_BATCHES = ACCUMULATION * UPDATES


def configured(backend: str, sharding: Any, precision: Any = "fp32", **sections: Any) -> Config:
    """Windows of two micro-batches, clipped in every update."""
    training = {"gradient_accumulation_steps": ACCUMULATION, "gradient_clipping": 0.5}
    return config(backend, sharding, precision=precision, training=training, **sections)


def windows(model: str = "mlp", updates: int = UPDATES) -> list[list[dict[str, Any]]]:
    """What the oracle trains on when each of 2 ranks has `own_share(ACCUMULATION * updates)`."""
    starts = range(0, ACCUMULATION * updates, ACCUMULATION)
    return [everyones(start, start + ACCUMULATION, world=2, model=model) for start in starts]


def tolerance(backend: str, strategy: str, precision: str, model: str = "mlp") -> Tolerance:
    """What the conformance suite allows this engine, its declared gaps included."""
    return conformance.tolerance(backend, Cell(model, strategy, ACCUMULATION, 0.5, precision, 2))


def assert_conforms(found: Curve, wanted: Curve, allowed: Tolerance) -> None:
    """Every field of the deviation is within its bound."""
    bounds = {name: getattr(allowed, name) for name in ("first_losses", "losses", "first_norm", "norms")} | {
        "lrs": 1e-12
    }
    deviation = conformance.compare(found, wanted)._asdict()
    beyond = {name: f"{value:.2g} > {bounds[name]:g}" for name, value in deviation.items() if not value <= bounds[name]}
    assert not beyond, beyond
