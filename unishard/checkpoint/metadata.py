"""Reads the index of a torch.distributed.checkpoint directory without trusting its pickle.

torch reads `.metadata` with plain `pickle` (torch 2.13, checkpoint/filesystem.py, FileSystemReader.read_metadata), which runs whatever
the file says. Here only the classes that such an index is made of can be named.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.checkpoint.metadata import Metadata

from unishard.errors import CheckpointError

__all__ = ["FILE", "read"]

FILE = ".metadata"
"""Its name in the directory."""

_ADMITTED = {
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "torch": {
        "Size", "device", "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "int16", "int32", "int64",
        "uint8", "uint16", "uint32", "uint64", "bool", "complex32", "complex64", "complex128", "contiguous_format", "preserve_format",
        "strided",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ADMITTED.get(module, ()):
            _refuse(f"names {module}.{name}, which an index of tensors has no use for; do not open it with anything else")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> NoReturn:
        _refuse("refers to objects outside it")


def read(folder: Path) -> Metadata:
    """The index of a directory.

    Raises:
        CheckpointError: There is none, it is damaged, or it names classes that have no place in it.
    """
    path = folder / FILE
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; this is no directory of torch.distributed.checkpoint") from error
    except Exception as error:  # a damaged pickle fails in any way
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error}); it is damaged") from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointError(f"{path}: holds no index of torch.distributed.checkpoint; it is damaged")
    return found


def _refuse(what: str) -> NoReturn:
    raise CheckpointError(what)
