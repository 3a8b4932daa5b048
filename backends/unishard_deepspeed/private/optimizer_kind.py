"""The DeepSpeed optimizer that a config runs, and the patches that it needs."""

from __future__ import annotations

from typing import Literal

from unishard.config import Config
from unishard_deepspeed import fields
from unishard_deepspeed.private import PRIVATE_API

__all__ = ["Kind", "kind_of", "require", "require_for"]

Kind = Literal["stage-0", "bf16-stage-1", "stages-1-2", "stage-3"]


def kind_of(cfg: Config) -> Kind:
    """Determine the kind from the config, not from attributes of the optimizer, which may be renamed."""
    if fields.stage(cfg) == 0:
        return "stage-0"
    if fields.stage(cfg) == 3:
        return "stage-3"
    return "bf16-stage-1" if fields.bf16_optimizer(cfg) else "stages-1-2"


def require(case: str, kind: Kind) -> None:
    """Check that a kind of optimizer supports a case; nothing is needed if DeepSpeed's documented interface is enough.

    Raises:
        BackendError: A private name is missing.
    """
    patch = PRIVATE_API.get(f"{case}-{kind}")
    if patch is not None:
        patch.require()


def require_for(cfg: Config, device: str, *, trains: bool, units: bool, groups: bool, copies: bool = False) -> None:
    """Check the private names that a config is known to need, before anything is changed. Imports DeepSpeed.

    Args:
        cfg: What to run.
        device: Type of the device.
        trains: Whether there is an optimizer.
        units: Whether the model has modules that are gathered together.
        groups: Whether several groups of ranks each hold a copy.
        copies: Whether smaller groups keep a second copy of the parameters.

    Raises:
        BackendError: A private name is missing.
    """
    kind, fp16 = kind_of(cfg), cfg.precision.compute == "fp16"
    if fp16 and device == "cpu":
        PRIVATE_API["fp16-on-cpu"].require()
    if cfg.offload.params == "nvme":
        PRIVATE_API["nvme-parameters"].require()
    if groups:
        require("replica-groups", kind)
    if copies:
        PRIVATE_API["second-copies"].require()
    if not trains:
        return
    if kind == "stage-3" and units:
        PRIVATE_API["leaf-gradients"].require()
    if cfg.sharding.conditional_modules:
        require("conditional-modules", kind)
    if cfg.training.nonfinite == "ignore" or (fp16 and kind == "stage-0"):
        require("nonfinite", kind)
    if fp16:
        require("divisor", kind)
    if cfg.checkpoint.automatic or cfg.checkpoint.on_signal:
        require("checkpoints", kind)
