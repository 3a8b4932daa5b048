"""The manifest: everything that a checkpoint says beside its tensors. Its presence means that the checkpoint is complete."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from unishard.errors import CheckpointError

__all__ = [
    "FILE",
    "FileFacts",
    "Group",
    "Manifest",
    "ModelFacts",
    "OptimizerFacts",
    "ScheduleFacts",
    "TensorFacts",
    "fingerprint_of",
    "read",
]

FILE = "manifest.json"
"""Its name in the directory of a checkpoint."""


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class FileFacts(_Facts):
    """One file of the directory."""

    bytes: int
    """Its size."""
    crc32: str
    """Of all its bytes, 8 hexadecimal digits."""


class TensorFacts(_Facts):
    """One tensor."""

    shape: list[int]
    """Of the whole."""
    dtype: str
    """As torch names it, such as `float32`."""
    hash: str
    """`unishard.checkpoint.hashing`, 16 hexadecimal digits: the same however the tensor was divided."""


class ModelFacts(_Facts):
    """The model."""

    class_name: str
    """Its class."""
    fingerprint: str
    """Of the names and shapes of its parameters and persistent buffers."""
    numel: int
    """Elements of all parameters, each counted once."""


class Group(_Facts):
    """One parameter group of the optimizer."""

    names: list[str]
    """Its parameters."""
    options: dict[str, Any]
    """Its options, such as `lr` and `weight_decay`, as they were."""


class OptimizerFacts(_Facts):
    """The optimizer."""

    class_name: str
    """Its class."""
    groups: list[Group]
    """In its order."""


class ScheduleFacts(_Facts):
    """The learning rate over time."""

    updates: int
    """Updates made: windows that ended without being skipped."""
    peaks: list[float] = []
    """The rate of each group that the config's schedule multiplies."""
    torch: dict[str, Any] | None = None
    """State of a scheduler object, where there was one."""


class LossScaleFacts(_Facts):
    """The loss scale of fp16."""

    value: float
    """What the loss is multiplied by."""
    made: int
    """Updates since it last changed."""


class Manifest(_Facts):
    """Everything that a checkpoint says beside its tensors."""

    format: Literal["unishard"] = "unishard"
    version: Literal[1] = 1
    """Of the format; a reader refuses another one."""
    written: str
    """UTC, ISO 8601."""
    versions: dict[str, str]
    """Of unishard, python, torch and the engine's package."""
    step: int
    """Accumulation windows that had ended, skipped ones too."""
    world_size: int
    """Ranks that wrote it."""
    config: dict[str, Any] | None = None
    """The config that ran; None where the checkpoint was converted from another tool's."""
    model: ModelFacts
    ties: dict[str, str] = {}
    """Other names of a parameter, to the one under which it is stored."""
    frozen: list[str] = []
    """Parameters that were not trainable."""
    buffers: list[str] = []
    """Those tensors of the model that are no parameters."""
    optimizer: OptimizerFacts | None = None
    schedule: ScheduleFacts | None = None
    loss_scale: LossScaleFacts | None = None
    data: list[Any] = []
    """State of each rank's loader, in the order of the ranks; tensors stand as in `state`."""
    state: Any = None
    """What the user saved: JSON, and `{"$tensor": name}` for a tensor among those of the checkpoint."""
    norms: dict[str, float] = {}
    """L2 norm of all parameters together, and of each kind of optimizer state."""
    files: dict[str, FileFacts]
    """Every file of the directory but this one."""
    tensors: dict[str, TensorFacts]
    """Every tensor."""


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: There is none, so the checkpoint is incomplete or of another tool; or this version cannot read it.
    """
    path = folder / FILE
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{folder}: there is no complete checkpoint here ({FILE}: {error.strerror}); see `unishard checkpoint list`"
        ) from error
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(each) for each in first["loc"])
        raise CheckpointError(
            f"{path}: {where + ': ' if where else ''}{first['msg']}; it is damaged, or written by a later unishard"
        ) from error


def fingerprint_of(shapes: Mapping[str, Sequence[int]]) -> str:
    """Of the names and shapes of a model's tensors: 16 hexadecimal digits, whatever their order."""
    lines = [f"{name} {tuple(shape)}\n" for name, shape in sorted(shapes.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]
