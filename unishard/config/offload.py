"""What lives in host memory instead of the accelerator's."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from unishard.config.section import Section

__all__ = ["Offload"]


class Offload(Section):
    """What lives in host memory between its uses. `offload: cpu` stands for both parameters and optimizer."""

    shorthand: ClassVar[tuple[str, ...]] = ("params", "optimizer")

    params: Literal["none", "cpu"] = Field(default="none")
    """Where the sharded parameters and their fp32 masters live."""
    optimizer: Literal["none", "cpu"] = Field(default="none")
    """Where the optimizer state lives and the optimizer steps."""
    pin_memory: bool = Field(default=True)
    """Whether offloaded tensors lie in page-locked host memory (faster copies, needs a CUDA device)."""
