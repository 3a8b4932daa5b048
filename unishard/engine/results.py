"""Results of an engine's calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Placement", "Resumed", "Step"]


class Step(NamedTuple):
    """What one call of `Engine.step` did."""

    updated: bool
    """Whether the parameters were updated: true at the end of an accumulation window, unless the update was skipped."""
    grad_norm: float | None
    """Global L2 norm of the averaged gradients before clipping, in fp32; None inside a window, infinite if a gradient is not finite."""
    lr: float
    """Learning rate of the first parameter group in this update; inside a window, in the coming one."""
    skipped: bool
    """Whether an update was due but skipped, because a gradient was infinite or NaN."""


class Placement(NamedTuple):
    """What an engine holds on this rank after `prepare`, from its live tensors."""

    engine: str
    """Class that runs the model, such as `DeepSpeedEngine`."""
    units: tuple[str, ...]
    """Names of the modules whose parameters are gathered together, without the root; empty if the engine has no units."""
    master_dtypes: frozenset[str]
    """Dtypes of the weights that the optimizer updates, such as `{"float32"}`."""
    master_numel: int
    """Elements of trainable master weights on this rank, including padding."""
    param_bytes: int
    """Bytes of the model's parameters on this rank between steps."""


class Resumed(NamedTuple):
    """Where a run continues after `Engine.load`."""

    path: Path
    """The checkpoint."""
    step: int
    """Accumulation windows that had ended when it was saved, including skipped updates."""
    epoch: int
    """Epoch of the training data, counted from 0."""
    state: Any
    """The user's `state`; None if there was none."""
    notes: tuple[str, ...]
    """Differences from the saved run: what did not match, what the config changes, what could not be resumed."""
