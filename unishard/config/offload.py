"""What lives in host memory, or on a local disk, instead of the accelerator's."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from unishard.config.section import Section, refuse

__all__ = ["Offload"]

Place = Literal["none", "cpu", "nvme"]


class Offload(Section):
    """What lives outside the accelerator between its uses. `offload: cpu` stands for both parameters and optimizer."""

    shorthand: ClassVar[tuple[str, ...]] = ("params", "optimizer")

    params: Place = Field(default="none")
    """Where the sharded parameters and their fp32 masters live: on the accelerator, in host memory (`cpu`), or in files (`nvme`)."""
    optimizer: Place = Field(default="none")
    """Where the optimizer state lives. With `cpu` and `nvme` the optimizer steps on the host."""
    pin_memory: bool = Field(default=True)
    """Whether offloaded tensors lie in page-locked host memory (faster copies, needs a CUDA device)."""
    nvme_path: str | None = Field(default=None)
    """Directory for the files of `nvme`, on a disk of each node; needed by it. Each rank writes files of its own there."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        places = (self.params, self.optimizer)
        problems: list[tuple[str, str]] = []
        if "nvme" in places and not self.nvme_path:
            problems.append(("nvme_path", "is needed by nvme; write a directory on a local disk, or cpu instead of nvme"))
        if self.nvme_path is not None and "nvme" not in places:
            problems.append(("nvme_path", "has no meaning when nothing is offloaded to nvme; remove it or set offload.params to nvme"))
        if "pin_memory" in self.model_fields_set and places == ("none", "none"):
            problems.append(("pin_memory", "has no meaning when nothing is offloaded; remove it or set offload.optimizer to cpu"))
        refuse(problems)
        return self
