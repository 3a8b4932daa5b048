"""The manifest: everything that a checkpoint says beside its tensors. Its presence means that the checkpoint is complete."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from unishard.errors import CheckpointError

__all__ = [
    "FILE",
    "FileFacts",
    "GroupRecord",
    "LossScaleFacts",
    "Manifest",
    "ModelRecord",
    "OptimizerFacts",
    "ScheduleFacts",
    "TensorFacts",
    "fingerprint_of",
    "read",
    "text_of",
]

FILE = "manifest.json"
"""Its name in the directory of a checkpoint."""
_LAST = re.compile(rb',\n "crc32": "[0-9a-f]{8}"\n}\n\Z')
"""The entry with the checksum, and the end of the file."""


class _Facts(BaseModel):
    # What is not finite, such as the norms of a run that diverged, stands as NaN and Infinity, which Python's json reads too.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, ser_json_inf_nan="constants")


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


class ModelRecord(_Facts):
    """The model."""

    class_name: str
    """Its class."""
    fingerprint: str
    """Of the names and shapes of its parameters and persistent buffers."""
    numel: int
    """Elements of all parameters, each counted once."""


class GroupRecord(_Facts):
    """One parameter group of the optimizer."""

    names: list[str]
    """Its parameters."""
    options: dict[str, Any]
    """Its options, such as `lr` and `weight_decay`, as they were."""


class OptimizerFacts(_Facts):
    """The optimizer."""

    class_name: str
    """Its class."""
    groups: list[GroupRecord]
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
    """Whose it is."""
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
    model: ModelRecord
    """The model."""
    ties: dict[str, str] = {}
    """Other names of a parameter, to the one under which it is stored."""
    frozen: list[str] = []
    """Parameters that were not trainable."""
    buffers: list[str] = []
    """Those tensors of the model that are no parameters."""
    optimizer: OptimizerFacts | None = None
    """The optimizer; None where nothing was trained."""
    schedule: ScheduleFacts | None = None
    """The learning rate over time; None where nothing was trained."""
    loss_scale: LossScaleFacts | None = None
    """The loss scale of fp16, 1.0 in other formats; None where it is not known."""
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
    crc32: str | None = None
    """Of the file up to this entry, the last, 8 hexadecimal digits; None where whoever wrote it gave none."""


def text_of(manifest: Manifest) -> str:
    """The manifest as it stands in its file, with its checksum.

    Raises:
        CheckpointError: Something in it is no JSON.
    """
    try:
        body = manifest.model_dump_json(indent=1, exclude={"crc32"}).removesuffix("\n}")
    except ValueError as error:
        raise CheckpointError(
            f"the manifest of step {manifest.step} cannot be written as JSON ({error}); put tensors into `state`"
        ) from error
    return f'{body},\n "crc32": "{zlib.crc32(body.encode()):08x}"\n}}\n'


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: There is none, so the checkpoint is incomplete or of another tool; or it is damaged, or this version cannot
            read it.
    """
    path = folder / FILE
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{folder}: there is no complete checkpoint here ({FILE}: {error.strerror}); see `unishard checkpoint list`"
        ) from error
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(each) for each in first["loc"])
        raise CheckpointError(
            f"{path}: {where + ': ' if where else ''}{first['msg']}; it is damaged, or written by a later unishard"
        ) from error
    last = _LAST.search(text)
    found = f"{zlib.crc32(text[: last.start()]):08x}" if last else None
    if manifest.crc32 not in (None, found):
        raise CheckpointError(
            f"{path}: has CRC-32 {found} instead of {manifest.crc32}; it is damaged, or was edited: then take the entry `crc32` out"
        )
    return manifest


def fingerprint_of(shapes: Mapping[str, Sequence[int]]) -> str:
    """Of the names and shapes of a model's tensors: 16 hexadecimal digits, whatever their order."""
    lines = [f"{name} {tuple(shape)}\n" for name, shape in sorted(shapes.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]
