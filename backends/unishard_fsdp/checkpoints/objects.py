"""The non-tensor values of a torch.distributed.checkpoint directory: numbers and strings, loaded safely from their
pickles.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from unishard.checkpoint import index_classes, metadata
from unishard.checkpoint.archives import read_through
from unishard.checkpoint.disk import fsync
from unishard.checkpoint.files import open_file
from unishard.checkpoint.inside_folder import OutsideFolderError, file_inside
from unishard.contract.training_facts import plain
from unishard.errors import CheckpointError

_LARGEST = 1 << 20
"""Maximum size of a value in bytes; optimizer options are smaller."""


def read_objects(folder: Path, prefix: str) -> tuple[dict[str, Any], list[str]]:
    """Read the plain values whose names have a prefix.

    Returns:
        The values by their names without the prefix, and the names of values of other types.
    """
    index = metadata.read(folder)
    values: dict[str, Any] = {}
    skipped: list[str] = []
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, BytesStorageMetadata) or not name.startswith(prefix):
            continue
        place = index.storage_data.get(MetadataIndex(name))
        try:
            values[name.removeprefix(prefix)] = _value(folder, place)
        except CheckpointError:
            raise
        except Exception:  # a damaged or malicious pickle can raise anything
            skipped.append(name)
    return values, skipped


def _value(folder: Path, place: Any) -> Any:
    """Load a value, which torch wrote with `torch.save` (torch 2.13, checkpoint/planner_helpers.py)."""
    if place.length > _LARGEST:
        raise ValueError("too large for an optimizer option")
    try:
        path = file_inside(folder, place.relative_path)
    except OutsideFolderError as error:
        raise CheckpointError(f"{folder}: {error}; do not trust this checkpoint, or put the file into it") from None
    with open_file(path) as file:
        file.seek(place.offset)
        record = io.BytesIO(file.read(place.length))
    for _ in read_through(record, f"{path}: an option of the optimizer"):
        pass
    value = torch.load(record, weights_only=True)
    if not plain(value):
        raise ValueError("not a plain value")
    return value


def add_objects(folder: Path, values: Mapping[str, tuple[tuple[str | int, ...], Any]]) -> None:
    """Add plain values to a directory that one process wrote.

    Args:
        folder: The directory.
        values: By name: the path where torch puts it in nested dictionaries, and the value.
    """
    index = metadata.read(folder)
    path = folder / "__0_1.distcp"
    at = 0
    with path.open("wb") as file:
        for name, (place, value) in values.items():
            buffer = io.BytesIO()
            torch.save(value, buffer)
            length = file.write(buffer.getbuffer())
            index.state_dict_metadata[name] = BytesStorageMetadata()
            index.storage_data[MetadataIndex(name)] = index_classes.place(path.name, at, length)
            index.planner_data[name] = place
            at += length
    fsync(path)
    (folder / metadata.FILE).write_bytes(pickle.dumps(index))
    fsync(folder / metadata.FILE)
