"""What is kept in host memory or on a local disk instead of accelerator memory."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from unishard.config.paths import Directory
from unishard.config.relevance import OffAt, UnusedIf
from unishard.config.section import Section, refuse

Place = Literal["none", "cpu", "nvme"]
_NOWHERE = UnusedIf(lambda cfg: cfg.offload.is_off, "nothing is offloaded")
_NO_FILES = UnusedIf(
    lambda cfg: "nvme" not in (cfg.offload.params, cfg.offload.optimizer), "nothing is offloaded to nvme"
)


class Offload(Section):
    """What is kept outside accelerator memory while it is not in use.

    `offload: cpu` stands for both parameters and optimizer, but not for activations.
    """

    shorthand: ClassVar[tuple[str, ...]] = ("params", "optimizer")

    params: Annotated[Place, OffAt("none")] = Field(default="none")
    """Where sharded parameters and their fp32 master weights are kept: on the accelerator, in host memory (`cpu`), or
    in files (`nvme`)."""
    optimizer: Annotated[Place, OffAt("none")] = Field(default="none")
    """Where the optimizer state is kept. With `cpu` and `nvme` the optimizer runs on the host."""
    activations: Annotated[Literal["none", "cpu"], OffAt("none")] = Field(default="none")
    """Where that lies which the model's repeated blocks keep for backward. With `cpu`, it leaves the accelerator after
    the forward of each block and comes back before its backward, while other blocks compute; with
    `activation_checkpointing: full`, it is the inputs of the blocks. Losses do not change."""
    pin_memory: Annotated[bool, _NOWHERE] = Field(default=True)
    """Whether offloaded tensors use page-locked host memory (faster copies; needs a CUDA device)."""
    nvme_path: Annotated[Directory, _NO_FILES] = Field(default=None)
    """Directory for the files of `nvme`, on a local disk of each node; required with `nvme`. Each rank writes its own
    files."""

    @property
    def is_off(self) -> bool:
        """Whether nothing is offloaded."""
        return self.params == self.optimizer == self.activations == "none"

    @model_validator(mode="after")
    def _check(self) -> Self:
        places = (self.params, self.optimizer)
        problems: list[tuple[str, str]] = []
        if "nvme" in places and not self.nvme_path:
            problems.append(
                ("nvme_path", "is required with nvme; write a directory on a local disk, or use cpu instead of nvme")
            )
        if self.nvme_path is not None and "nvme" not in places:
            problems.append(
                ("nvme_path", "is unused: nothing is offloaded to nvme; remove it or set offload.params to nvme")
            )
        if "pin_memory" in self.changed and self.is_off:
            problems.append(
                ("pin_memory", "is unused: nothing is offloaded; remove it or set offload.optimizer to cpu")
            )
        refuse(problems)
        return self
