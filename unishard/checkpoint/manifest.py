"""The manifest: all metadata of a checkpoint. Its presence means that the checkpoint is complete."""

from __future__ import annotations

import hashlib
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from unishard.checkpoint.files import read_bytes
from unishard.contract.training_facts import LARGEST, Facts, LossScaleFacts, OptimizerFacts, PassFacts, ScheduleFacts
from unishard.errors import CheckpointError

FILE = "manifest.json"
"""Its name in a checkpoint directory."""
_LAST = re.compile(rb',\n "crc32": "[0-9a-f]{8}"\n}\n\Z')
"""The entry with the checksum, and the end of the file."""

_CRC32 = r"^[0-9a-f]{8}$"
_LARGEST_FILE = 2**30
"""Bytes of a manifest; that of a model with 100,000 tensors has 40 MB."""


class FileFacts(Facts):
    """One file of the directory."""

    bytes: int = Field(ge=0, lt=LARGEST)
    """Size of the file."""
    crc32: str = Field(pattern=_CRC32)
    """CRC-32 of the file, 8 hexadecimal digits."""


class TensorFacts(Facts):
    """One tensor."""

    shape: list[int]
    """Shape of the full tensor."""
    dtype: str = Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")
    """torch's name of the dtype, such as `float32`."""
    hash: str = Field(pattern=r"^[0-9a-f]{16}$")
    """Hash of `unishard.checkpoint.hashing`, 16 hexadecimal digits; does not depend on how the tensor was sharded."""

    @field_validator("shape")
    @classmethod
    def _is_a_shape(cls, shape: list[int]) -> list[int]:
        if min(shape, default=0) < 0 or math.prod(shape) >= LARGEST:
            raise ValueError("is not the shape of a tensor")
        return shape


class ModelRecord(Facts):
    """The model."""

    class_name: str
    """Class of the model."""
    fingerprint: str
    """Hash of the names and shapes of its parameters and persistent buffers."""
    numel: int = Field(ge=0, lt=LARGEST)
    """Number of elements of all parameters, each parameter counted once."""


class Manifest(Facts):
    """All metadata of a checkpoint."""

    format: Literal["unishard"] = "unishard"
    """The format of the checkpoint."""
    version: Literal[1] = 1
    """Version of the format; a reader rejects any other."""
    written: str
    """Time of writing: UTC, ISO 8601."""
    versions: dict[str, str]
    """Versions of unishard, python, torch and the engine's package."""
    step: int = Field(ge=0, lt=LARGEST)
    """Completed accumulation windows, including skipped ones."""
    run: str | None = Field(default=None, pattern=r"^[0-9a-f]{8}$")
    """The run that saved it, 8 hexadecimal digits: made at its first save, the same after a resume. None if unknown."""
    commit: int | None = Field(default=None, ge=0)
    """Number of this commit under its root: the highest is the newest checkpoint. None if unknown."""
    metric: float | None = None
    """What `engine.save` was passed as the metric, the lowest or highest of which is the best checkpoint."""
    world_size: int = Field(ge=1, lt=2**31)
    """Ranks that wrote it."""
    config: dict[str, Any] | None = None
    """The config of the run; None if the checkpoint was converted from another tool's."""
    model: ModelRecord
    """The model."""
    ties: dict[str, str] = Field(default_factory=dict)
    """Other names of tied parameters, to the name under which each is stored."""
    frozen: list[str] = Field(default_factory=list)
    """Parameters that were not trainable."""
    buffers: list[str] = Field(default_factory=list)
    """Tensors of the model that are not parameters."""
    optimizer: OptimizerFacts | None = None
    """The optimizer; None for inference."""
    schedule: ScheduleFacts | None = None
    """The learning rate schedule; None for inference."""
    loss_scale: LossScaleFacts | None = None
    """The loss scale of fp16, 1.0 for other dtypes; None if unknown."""
    data: list[Any] = Field(default_factory=list)
    """State of each rank's data loader, in rank order; tensors are encoded as in `state`."""
    passes: PassFacts | None = None
    """Passes over the training data; None if `data` says it, or nothing was read with `engine.batches`."""
    state: Any = None
    """The user's own state: JSON, with `{"$tensor": name}` for a tensor of the checkpoint."""
    extra_state: dict[str, Any] | None = None
    """What modules returned from `get_extra_state`, by their names, encoded as in `state`; None if none has any."""
    norms: dict[str, float] = Field(default_factory=dict)
    """L2 norm of all parameters, and of each kind of optimizer state."""
    files: dict[str, FileFacts]
    """All files of the directory except this one."""
    tensors: dict[str, TensorFacts]
    """All tensors."""
    crc32: str | None = Field(default=None, pattern=_CRC32)
    """CRC-32 of the file up to this entry, which is the last, 8 hexadecimal digits; None if the writer gave none."""

    @field_validator("files")
    @classmethod
    def _has_names(cls, files: dict[str, FileFacts]) -> dict[str, FileFacts]:
        if "" in files or any("\0" in name for name in files):
            raise ValueError("has an entry that cannot be the name of a file")
        return files


def text_of(manifest: Manifest) -> str:
    """The manifest as it is written to its file, with its checksum.

    Raises:
        CheckpointError: A value cannot be written as JSON.
    """
    try:
        unused = {"passes"} if manifest.passes is None else set()  # versions that do not know it refuse it
        body = manifest.model_dump_json(indent=1, exclude={"crc32", *unused}).removesuffix("\n}")
    except ValueError as error:
        raise CheckpointError(
            f"the manifest of step {manifest.step} cannot be written as JSON ({error}); put tensors into `state`"
        ) from error
    return f'{body},\n "crc32": "{zlib.crc32(body.encode()):08x}"\n}}\n'


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: It is missing (the checkpoint is incomplete or from another tool), damaged, or of an unknown
            version.
    """
    path = folder / FILE
    try:
        text = read_bytes(path, _LARGEST_FILE)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: not a complete checkpoint ({FILE}: {error.strerror}); run `unishard checkpoint list`"
        ) from error
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        problem = (where + ": " if where else "") + first["msg"].removeprefix("Value error, ")
        raise CheckpointError(
            f"{path}: {problem}; the file is damaged, or was written by a later version of unishard"
        ) from error
    last = _LAST.search(text)
    checksum = f"{zlib.crc32(text[: last.start()]):08x}" if last else None
    if manifest.crc32 not in (None, checksum):
        raise CheckpointError(
            f"{path}: has CRC-32 {checksum} instead of {manifest.crc32}; the file is damaged; if you edited it, remove "
            "the entry `crc32`"
        )
    return manifest


def fingerprint_of(shapes: Mapping[str, Sequence[int]]) -> str:
    """A hash of the names and shapes of a model's tensors: 16 hexadecimal digits, independent of their order."""
    lines = [f"{name} {tuple(shape)}\n" for name, shape in sorted(shapes.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]
