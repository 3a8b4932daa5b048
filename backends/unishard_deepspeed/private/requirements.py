"""The private names that a run is known to need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unishard_deepspeed.private import PRIVATE_API
from unishard_deepspeed.private.table import Cases

if TYPE_CHECKING:
    from unishard_deepspeed.spec import ZeroSpec


def require_for(spec: ZeroSpec, cases: Cases, device: str, *, trains: bool, units: bool) -> None:
    """Check the private names that a run is known to need, before anything is changed. Imports DeepSpeed.

    Args:
        spec: What to build.
        cases: Of its optimizer.
        device: Type of the device.
        trains: Whether there is an optimizer.
        units: Whether the model has modules that are gathered together.

    Raises:
        BackendError: A private name is missing.
    """
    fp16 = spec.precision.compute == "fp16"
    if fp16 and device == "cpu":
        PRIVATE_API["fp16-on-cpu"].require()
    if spec.replicas is not None:
        cases.replica_groups.require()
    if spec.second_copies:
        PRIVATE_API["second-copies"].require()
    if spec.replicates:
        cases.replicated.require()
    if not trains:
        return
    if units:
        cases.leaf_gradients.require()
    if spec.has_conditional:
        cases.conditional_modules.require()
    if not spec.skips:
        cases.nonfinite.require()
    if fp16:
        cases.fp16.require()
        cases.divisor.require()
    if spec.saves:
        cases.checkpoints.require()
