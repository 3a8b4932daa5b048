"""What a backend says of the checkpoint directories that its engine's scripts write and read without unishard. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unishard.checkpoint.manifest import GroupRecord, LossScaleFacts, OptimizerFacts, ScheduleFacts

if TYPE_CHECKING:
    from unishard.checkpoint.lazy_shards import LazyShard

__all__ = ["Advance", "CheckpointFormat", "Contents", "optimizer_of", "plain"]

Advance = Callable[[int], None]
"""Told how many bytes more have been written."""


@dataclass(frozen=True)
class Contents:
    """A whole checkpoint as one process sees it: its facts, and its tensors before anything of them is read."""

    stretches: Mapping[str, LazyShard]
    """Every tensor under its name in a checkpoint of unishard (`unishard.checkpoint.keys`), each of them whole."""
    step: int
    """Accumulation windows that had ended."""
    world_size: int
    """Ranks that wrote it; 1 where it does not say."""
    optimizer: OptimizerFacts | None = None
    ties: Mapping[str, str] = field(default_factory=dict)
    """Other names of a parameter, to the one under which it is stored."""
    frozen: tuple[str, ...] = ()
    """Parameters that were not trainable."""
    buffers: tuple[str, ...] = ()
    """Tensors of the model that are no parameters."""
    schedule: ScheduleFacts | None = None
    loss_scale: LossScaleFacts | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the packages that wrote it."""
    model: str = ""
    """Class of the model, where that is known."""
    notes: tuple[str, ...] = ()
    """What is left behind, and why."""

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(math.prod(stretch.shape) * stretch.dtype.itemsize for stretch in self.stretches.values())

    def leaving(self, *notes: str) -> Contents:
        """The same, with more to say of what is left behind."""
        return replace(self, notes=(*self.notes, *notes))


@dataclass(frozen=True)
class CheckpointFormat:
    """One kind of checkpoint directory. What it holds imports torch when it is called, not before."""

    name: str
    """The word after `--from` and `--to`."""
    title: str
    """What writes such directories."""
    recognises: Callable[[Path], bool]
    """Whether a folder is one, by the names of its files."""
    read: Callable[[Path], Contents] | None = None
    """Says what a folder holds, or raises `CheckpointError` for what is not understood. None where it cannot be read."""
    write: Callable[[Contents, Path, Advance], tuple[str, ...]] | None = None
    """Fills an empty folder and returns what is left behind, and why. None where it cannot be written."""


def plain(value: Any) -> bool:
    """Whether a value can stand in a manifest: a number, a word, nothing, or a list of them."""
    return value is None or isinstance(value, (bool, int, float, str)) or (isinstance(value, (list, tuple)) and all(map(plain, value)))


def optimizer_of(groups: Iterable[tuple[Iterable[str], Mapping[str, Any]]], keys: Iterable[str]) -> OptimizerFacts:
    """The facts of an optimizer whose class is not on record: its class follows from what it keeps.

    Args:
        groups: Names of the parameters and options of each group.
        keys: Of the optimizer's state, such as `exp_avg`.
    """
    facts = [
        GroupRecord(names=list(names), options={key: value for key, value in options.items() if key != "params" and plain(value)})
        for names, options in groups
    ]
    decoupled = facts[0].options.get("decoupled_weight_decay", True) if facts else True
    classes = {"exp_avg_sq": "AdamW" if decoupled else "Adam", "momentum_buffer": "SGD", "sum": "Adagrad", "exp_avg": "Lion"}
    held = set(keys)
    return OptimizerFacts(class_name=next((name for key, name in classes.items() if key in held), "unknown"), groups=facts)
