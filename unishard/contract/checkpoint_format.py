"""Describes the checkpoint directories that scripts write and read without unishard. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from unishard.contract.training_facts import LossScaleFacts, OptimizerFacts, ScheduleFacts

if TYPE_CHECKING:
    from unishard.distributed.lazy_shards import LazyShard


Advance = Callable[[int], None]
"""Called with the number of further bytes written."""


@dataclass(frozen=True)
class Contents:
    """A checkpoint as one process sees it: its metadata, and its tensors, none of them read yet."""

    shards: Mapping[str, LazyShard]
    """All full tensors, by their names in a unishard checkpoint (`unishard.checkpoint.manifest`)."""
    step: int
    """Completed accumulation windows."""
    world_size: int
    """Ranks that wrote it; 1 if unknown."""
    optimizer: OptimizerFacts | None = None
    ties: Mapping[str, str] = field(default_factory=dict)
    """Other names of a parameter, to the name under which it is stored."""
    frozen: tuple[str, ...] = ()
    """Parameters that were not trainable."""
    buffers: tuple[str, ...] = ()
    """Tensors of the model that are not parameters."""
    schedule: ScheduleFacts | None = None
    loss_scale: LossScaleFacts | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the packages that wrote it."""
    model: str = ""
    """Class of the model, if known."""
    notes: tuple[str, ...] = ()
    """What is not converted, and why."""
    archives: tuple[Path, ...] = ()
    """Files of torch.save that it consists of, to be verified by their own checksums."""

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(math.prod(stretch.shape) * stretch.dtype.itemsize for stretch in self.shards.values())

    def leaving(self, *notes: str) -> Contents:
        """The same, with further notes on what is not converted."""
        return replace(self, notes=(*self.notes, *notes))


@dataclass(frozen=True)
class CheckpointFormat:
    """One kind of checkpoint directory. Its functions import torch when they are called, not before."""

    name: str
    """The value of `--from` and `--to`."""
    title: str
    """The tool that writes such directories."""
    recognises: Callable[[Path], bool]
    """Whether a folder has this format, by the names of its files."""
    read: Callable[[Path], Contents] | None = None
    """Returns the contents of a folder, or raises `CheckpointError` if they are not supported. None if the format
    cannot be read."""
    write: Callable[[Contents, Path, Advance], tuple[str, ...]] | None = None
    """Fills an empty folder and returns notes on what is not converted. None if the format cannot be written."""
