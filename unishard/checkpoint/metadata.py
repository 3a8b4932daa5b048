"""Reads the index of a torch.distributed.checkpoint directory without trusting its pickle.

torch reads `.metadata` with plain `pickle` (torch 2.13, checkpoint/filesystem.py, FileSystemReader.read_metadata),
which can execute arbitrary code. This reader admits only the classes that such an index consists of.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from unishard.checkpoint.files import read_bytes
from unishard.checkpoint.index_classes import is_place, memory_format, require
from unishard.errors import CheckpointError

FILE = ".metadata"
"""Its name in the directory."""
_LARGEST = 2**33
"""Bytes of an index; one of 70 billion parameters on 1,024 ranks has 240 MB."""
_ADMITTED = {
    "collections": {"OrderedDict"},
    "torch": {
        "Size", "device", "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2",
        "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "int8", "int16", "int32", "int64",
        "uint8", "uint16", "uint32", "uint64", "bool", "complex32", "complex64", "complex128", "contiguous_format",
        "preserve_format", "strided",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Admits the classes of an index, so that no code of the file runs."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module in ("pathlib", "pathlib._local"):  # the latter of Python 3.13
            return _path
        if name not in _ADMITTED.get(module, ()):
            _refuse(
                f"refers to {module}.{name}, which no tensor index needs; the file may be malicious, do not open it"
            )
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> NoReturn:
        _refuse("refers to objects outside it")


def read(folder: Path) -> Metadata:
    """The index of a directory.

    Raises:
        CheckpointError: It is missing or damaged, or refers to other classes.
        BackendError: This version of torch has another kind of index.
    """
    require()
    path = folder / FILE
    try:
        data = read_bytes(path, _LARGEST)
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}; this is not a torch.distributed.checkpoint directory"
        ) from error
    try:
        index: Metadata = _Unpickler(io.BytesIO(data)).load()
        sound = isinstance(index, Metadata) and _is_sound(index)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error}); it is damaged") from error
    if not sound:
        raise CheckpointError(f"{path}: not an index of torch.distributed.checkpoint; it is damaged")
    return index


def _is_sound(index: Metadata) -> bool:
    """Whether every value has the declared type, and every box lies within its tensor."""
    entries = all(isinstance(name, str) and _is_entry(entry) for name, entry in index.state_dict_metadata.items())
    places = all(isinstance(at, MetadataIndex) and _is_place(place) for at, place in index.storage_data.items())
    return entries and places


def _is_entry(entry: Any) -> bool:
    if isinstance(entry, BytesStorageMetadata):
        return True
    size = entry.size
    return (
        isinstance(entry, TensorStorageMetadata)
        and isinstance(entry.properties.dtype, torch.dtype)
        and isinstance(size, torch.Size)
        and min(size, default=0) >= 0
        and isinstance(entry.chunks, list)
        and all(isinstance(chunk, ChunkStorageMetadata) and _is_within(size, chunk) for chunk in entry.chunks)
        and sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(size)
    )


def _is_within(size: torch.Size, chunk: ChunkStorageMetadata) -> bool:
    boxes = zip(chunk.offsets, chunk.sizes, size, strict=True)
    return all(min(offset, length) >= 0 and offset + length <= full for offset, length, full in boxes)


def _is_place(place: Any) -> bool:
    numbers = isinstance(place.offset, int) and isinstance(place.length, int) and min(place.offset, place.length) >= 0
    return is_place(place) and isinstance(place.relative_path, str) and place.relative_path.isprintable() and numbers


def _member(kind: Any, name: Any) -> Any:
    """The only permitted use of `getattr`: Python 3.11.0 to 3.11.3 pickles enum members that way (enum.py,
    __reduce_ex__).
    """
    member = memory_format(kind, name)
    if member is None:
        _refuse("refers to builtins.getattr, which no tensor index needs; the file may be malicious, do not open it")
    return member


def _path(*parts: Any) -> Path:
    """In place of a class of pathlib, which a file could change."""
    return Path(*parts)


def _refuse(problem: str) -> NoReturn:
    """Raise the error of an index; `read` adds the path."""
    raise CheckpointError(problem)
