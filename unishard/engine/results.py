"""What an engine's calls return."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Placement", "Resumed", "Step"]


class Step(NamedTuple):
    """What one call of `Engine.step` did."""

    updated: bool
    """Whether the parameters changed: true at the end of an accumulation window, unless the update was skipped."""
    grad_norm: float | None
    """Global L2 norm of the averaged gradients before clipping, in fp32; None inside a window, infinite if a gradient is not finite."""
    lr: float
    """Learning rate of the first parameter group: the one this update used; inside a window the one it will use."""
    skipped: bool
    """Whether an update was due but skipped, because a gradient was infinite or not a number."""


class Placement(NamedTuple):
    """What an engine holds after `prepare`, read from its live tensors, on this rank."""

    engine: str
    """Class that runs the model, such as `DeepSpeedEngine`."""
    units: tuple[str, ...]
    """Names of the modules whose parameters are gathered together, without the root; empty where the engine has no units."""
    master_dtypes: frozenset[str]
    """Dtypes of the weights that the optimizer updates, such as `{"float32"}`."""
    master_numel: int
    """Elements of trainable master weights on this rank, padding included."""
    param_bytes: int
    """Bytes of the model's parameters on this rank between steps."""


class Resumed(NamedTuple):
    """Where a run continues after `Engine.load`."""

    path: Path
    """The checkpoint."""
    step: int
    """Accumulation windows that had ended when it was saved, skipped ones too."""
    epoch: int
    """Epoch of the training data in which it continues, counted from 0."""
    state: Any
    """What the user saved along with it; None for nothing."""
    notes: tuple[str, ...]
    """What differs from the saved run: what did not fit, what the config sets otherwise, what could not be continued."""
