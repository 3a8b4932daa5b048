"""The private names that a run needs, by the kind of its optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unishard_deepspeed.kind import Kind
from unishard_deepspeed.private import PRIVATE_API

if TYPE_CHECKING:
    from unishard_deepspeed.spec import ZeroSpec


def require(case: str, kind: Kind) -> None:
    """Check that a kind of optimizer supports a case; nothing is needed if DeepSpeed's documented interface is enough.

    Raises:
        BackendError: A private name is missing.
    """
    patch = PRIVATE_API.get(f"{case}-{kind}")
    if patch is not None:
        patch.require()


def require_for(spec: ZeroSpec, device: str, *, trains: bool, units: bool) -> None:
    """Check the private names that a run is known to need, before anything is changed. Imports DeepSpeed.

    Args:
        spec: What to build.
        device: Type of the device.
        trains: Whether there is an optimizer.
        units: Whether the model has modules that are gathered together.

    Raises:
        BackendError: A private name is missing.
    """
    kind, fp16 = spec.kind, spec.precision.compute == "fp16"
    if fp16 and device == "cpu":
        PRIVATE_API["fp16-on-cpu"].require()
    if spec.params_in_files:
        PRIVATE_API["nvme-parameters"].require()
    if spec.replicas is not None:
        require("replica-groups", kind)
    if spec.second_copies:
        PRIVATE_API["second-copies"].require()
    if spec.replicates:
        require("replicated", kind)
    if not trains:
        return
    if kind == "stage-3" and units:
        PRIVATE_API["leaf-gradients"].require()
    if spec.has_conditional:
        require("conditional-modules", kind)
    if not spec.skips or (fp16 and kind == "stage-0"):
        require("nonfinite", kind)
    if fp16:
        require("divisor", kind)
    if spec.saves:
        require("checkpoints", kind)
