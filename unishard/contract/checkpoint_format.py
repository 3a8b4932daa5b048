"""Describes the checkpoint directories that scripts write and read without unishard, and what a checkpoint says of the
optimizer, the schedule and the loss scale, whichever engine or tool wrote it. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from unishard.distributed.shards import LazyShard


LARGEST = 2**62
"""No count of anything is as large."""


class Facts(BaseModel):
    """A part of a manifest."""

    # Non-finite values, such as the norms of a diverged run, are written as NaN and Infinity, which Python's json reads
    # too.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, ser_json_inf_nan="constants")


class GroupRecord(Facts):
    """One parameter group of the optimizer."""

    names: list[str]
    """Names of its parameters."""
    options: dict[str, Any]
    """Its options, such as `lr` and `weight_decay`."""


class OptimizerFacts(Facts):
    """The optimizer."""

    class_name: str
    """Class of the optimizer."""
    groups: list[GroupRecord]
    """Its parameter groups, in order."""


class SchedulerRecord(Facts):
    """A scheduler object of torch or transformers."""

    class_name: str
    """Class of the scheduler."""
    state: Any
    """What its `state_dict` returned, encoded as in `state` of the manifest, without tensors."""


class ScheduleFacts(Facts):
    """The learning rate schedule."""

    updates: int = Field(ge=0, lt=LARGEST)
    """Optimizer steps taken; skipped ones are not counted."""
    peaks: list[float] = []
    """Peak learning rate of each parameter group, which the config's schedule multiplies."""
    torch: SchedulerRecord | None = None
    """State of the scheduler object, if there was one."""


class LossScaleFacts(Facts):
    """The loss scale of fp16."""

    value: float = Field(gt=0, allow_inf_nan=False)
    """The factor of the loss."""
    made: int = Field(ge=0, lt=LARGEST)
    """Optimizer steps since it last changed."""


class PassFacts(Facts):
    """The training data, where the loader's position does not tell the epoch."""

    loader: str
    """Class of the loader."""
    epoch: int | None = Field(default=None, ge=0, lt=LARGEST)
    """Passes over it that are complete, counted by the engine; None if unknown."""
    batches: int = Field(default=0, ge=0, lt=LARGEST)
    """Batches that a rank has read since."""


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


def plain(value: Any) -> bool:
    """Whether a value can be stored in a manifest: a number, a string, a boolean, None, or a list of them."""
    return (
        value is None
        or isinstance(value, (bool, int, float, str))
        or (isinstance(value, (list, tuple)) and all(map(plain, value)))
    )


def optimizer_of(groups: Iterable[tuple[Iterable[str], Mapping[str, Any]]], keys: Iterable[str]) -> OptimizerFacts:
    """The facts of an optimizer whose class is not recorded: the class is inferred from its state.

    Args:
        groups: Names of the parameters and options of each group.
        keys: Of the optimizer's state, such as `exp_avg`.
    """
    facts = [
        GroupRecord(
            names=list(names),
            options={key: value for key, value in options.items() if key != "params" and plain(value)},
        )
        for names, options in groups
    ]
    decoupled = facts[0].options.get("decoupled_weight_decay", True) if facts else True
    classes = {
        "exp_avg_sq": "AdamW" if decoupled else "Adam",
        "momentum_buffer": "SGD",
        "sum": "Adagrad",
        "exp_avg": "Lion",
    }
    held = set(keys)
    return OptimizerFacts(
        class_name=next((name for key, name in classes.items() if key in held), "unknown"), groups=facts
    )
