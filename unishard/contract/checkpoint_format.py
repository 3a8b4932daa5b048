"""Describes the checkpoint directories that scripts write and read without unishard. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unishard.contract.training_facts import GroupRecord, LossScaleFacts, OptimizerFacts, ScheduleFacts

if TYPE_CHECKING:
    from unishard.distributed.shards import LazyShard

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
