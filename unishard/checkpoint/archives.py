"""Checks files of torch.save, which are zip archives, before and while they are read.

`torch.load` compares no checksums, decompresses, and hashes keys that refer to themselves (torch 2.13).
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from typing import IO, Any

from unishard.checkpoint.budgets import MOST_DIMS, BoundedUnpickler, refuse, require_small
from unishard.errors import CheckpointError

_BLOCK = 1 << 22
"""Bytes in memory at once."""
_ELEMENTS, _ELEMENTS_A_BYTE = 1 << 24, 16
"""Elements of all tensors in any file, and further ones for each of its bytes: tensors may share memory, or repeat it
(stride 0)."""

_OF_TYPE = "_rebuild_from_type_v2"
"""Calls its first argument with its third, for a tensor with attributes of its own (torch 2.13, _tensor.py)."""


def require_bounded(file: IO[bytes]) -> None:
    """Check an archive before torch reads it: it is not compressed, and means about as much as its length.

    Args:
        file: The archive, which is at its beginning afterwards.

    Raises:
        CheckpointError: It means more; says what.
        Exception: It is damaged, or no archive.
    """
    with zipfile.ZipFile(file) as archive:
        entries, size = archive.infolist(), file.seek(0, 2)
        _require_stored(entries)
        if sum(entry.file_size for entry in entries) > size or len({entry.filename for entry in entries}) < len(
            entries
        ):
            refuse("its entries overlap; the file may be malicious, do not open it")
        pickles = [_content(archive, entry) for entry in entries if entry.filename.endswith("data.pkl")]
    file.seek(0)
    for data in pickles:
        outline = _Outline(data)
        require_small(outline.load(), len(data))
        if outline.elements > _ELEMENTS + _ELEMENTS_A_BYTE * size:
            refuse(
                f"has {size} bytes and tensors of {outline.elements} elements; the file may be malicious, do not open "
                "it"
            )


def read_through(file: IO[bytes], shown: str) -> Iterator[int]:
    """Read an archive and compare its checksums. An archive may lack them: unishard has its own, of the entire file.

    Args:
        file: The archive.
        shown: What it is, for the message.

    Yields:
        The number of further bytes read.

    Raises:
        CheckpointError: It is damaged, or no such archive.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            _require_stored(archive.infolist())
            for entry in archive.infolist():
                if entry.CRC:  # 0 where the writer put none
                    with archive.open(entry) as record:
                        while block := record.read(_BLOCK):
                            yield len(block)
    except Exception as error:  # a damaged archive can raise anything
        raise CheckpointError(
            f"{shown}: its checksums do not match ({error}); the file is damaged, use another checkpoint"
        ) from error


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    if not entry.CRC:  # the writer put none, and zipfile compares it
        del entry.CRC
    return archive.read(entry)


def _require_stored(entries: list[zipfile.ZipInfo]) -> None:
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            refuse(f"{entry.filename} is compressed, which torch.save never does")


class _Outline(BoundedUnpickler):
    """Reads the lists, tuples and dicts of a pickle, with empty objects in place of all others, and counts the elements
    of its tensors.
    """

    elements = 0

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Dict if name == "OrderedDict" else _Empty,), {})

    def persistent_load(self, pid: Any) -> Any:
        """A storage."""
        if not isinstance(pid, tuple) or any(isinstance(part, list | tuple | dict) for part in pid):
            refuse("refers to what is no storage; it is damaged")
        return _Empty()

    def is_key(self, value: Any) -> bool:
        return isinstance(value, _Empty | type)

    def note_call(self, function: Any, arguments: tuple[Any, ...]) -> None:
        """Count a tensor: torch rebuilds it from a storage, an offset, its shape, and so on (torch 2.13, _utils.py)."""
        while (
            function.__name__ == _OF_TYPE
            and len(arguments) > 2
            and isinstance(arguments[0], type)
            and isinstance(arguments[2], tuple)
        ):
            function, arguments = arguments[0], arguments[2]
        if function.__name__.startswith("_rebuild") and len(arguments) > 2 and isinstance(arguments[2], tuple):
            if len(arguments[2]) > MOST_DIMS or not all(isinstance(length, int) for length in arguments[2]):
                refuse("has a tensor with an impossible shape; it is damaged")
            self.elements += math.prod(arguments[2])


class _Empty:
    """Takes whatever a pickle gives an object, and keeps nothing."""

    def __new__(cls, *arguments: Any) -> _Empty:
        return super().__new__(cls)

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def extend(self, items: Any) -> None: ...

    append = extend


class _Dict(dict[Any, Any]):
    """An OrderedDict, as torch stores those of tensors and shapes."""

    def __setstate__(self, state: Any) -> None: ...
