"""What is kept in host memory or on a local disk instead of accelerator memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from unishard.config.paths import Directory
from unishard.config.relevance import OffAt, OnlyWith
from unishard.config.section import Section

Place = Literal["none", "cpu", "nvme"]
_OFFLOADED = OnlyWith(
    {"optimizer": ("cpu", "nvme"), "params": ("cpu", "nvme"), "activations": {"cpu"}},
    "nothing is offloaded",
    "is unused: nothing is offloaded; remove it or set offload.optimizer to cpu",
)
_FILES = OnlyWith(
    {"params": ("nvme",), "optimizer": ("nvme",)},
    "nothing is offloaded to nvme",
    "is unused: nothing is offloaded to nvme; remove it or set offload.params to nvme",
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
    """Where the optimizer state is kept. With `cpu` and `nvme` the optimizer runs on the host; with `nvme` it steps
    pieces of the state, which are read before and written afterwards."""
    activations: Annotated[Literal["none", "cpu"], OffAt("none")] = Field(default="none")
    """Where that lies which the model's repeated blocks keep for backward. With `cpu`, it leaves the accelerator after
    the forward of each block and comes back before its backward, while other blocks compute; with
    `activation_checkpointing: full`, it is the inputs of the blocks. Losses do not change."""
    pin_memory: Annotated[bool, _OFFLOADED] = Field(default=True)
    """Whether offloaded tensors use page-locked host memory (faster copies; needs a CUDA device)."""
    nvme_path: Annotated[Directory, _FILES] = Field(default=None)
    """Directory for the files of `nvme`, on a local disk of each node; required with `nvme`. Each rank has one file,
    without a name, which is gone with its process. Checkpoints do not depend on it."""

    def _problems(self) -> Iterator[tuple[str, str]]:
        if "nvme" in (self.params, self.optimizer) and not self.nvme_path:
            yield "nvme_path", "is required with nvme; write a directory on a local disk, or use cpu instead of nvme"
