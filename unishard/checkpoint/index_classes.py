"""Private classes in the index of torch.distributed.checkpoint, looked up when an index is written or read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint import filesystem, metadata

from unishard.contract.private_api import CORE_PRIVATE_API

_PATCH = CORE_PRIVATE_API["checkpoint-index"]


def require() -> None:
    """Check that this torch has the index layout that we support.

    Raises:
        BackendError: It does not.
    """
    _PATCH.require()


def place(file: str, begin: int, length: int) -> Any:
    """The index entry that says where a record lies.

    Args:
        file: Name of the file in the directory.
        begin: First byte.
        length: Bytes.
    """
    return filesystem._StorageInfo(file, begin, length)


def index_of(entries: Any, paths: Mapping[str, tuple[str, ...]], places: Any) -> Any:
    """An index, as torch's own writer fills it in.

    Args:
        entries: What it says of each tensor.
        paths: Where each tensor is in nested dictionaries.
        places: Where each chunk lies.
    """
    meta = metadata.StorageMeta()  # without the path that torch would write
    made = metadata.Metadata(
        state_dict_metadata=entries, planner_data=dict(paths), storage_data=places, storage_meta=meta
    )
    if hasattr(made, "version"):
        made.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    return made


def is_place(value: Any) -> bool:
    """Whether a value from an index says where a record lies."""
    return isinstance(value, filesystem._StorageInfo)


def memory_format(kind: Any, name: Any) -> Any:
    """The enum member that a pickled index names; None for any other name."""
    known = metadata._MEM_FORMAT_ENCODING
    return known[name] if kind is known and name in known.__members__ else None
