"""A second index of a checkpoint, beside the pickle that torch reads: a table of rows of fixed size, of which each rank
reads only what it needs.

    format                        the 17 bytes of `unishard-index-1` and a line feed
    length of the header          8 bytes, little-endian
    header                        JSON: files, and for each tensor its dtype, shape, first row and number of rows
    rows                          4 numbers of 8 bytes each: the first element in the flattened tensor, the file, the
                                  first byte, the number of bytes

The rows of a tensor are in the order of its elements and cover all of them, so each ends where the next one begins. A
row is found by bisection: of 70 billion parameters on 1,024 ranks, a rank reads 60 kilobytes of rows for each thousand
tensors instead of 400 MB.
"""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unishard.checkpoint import metadata
from unishard.checkpoint.budgets import MOST_DIMS, MOST_NAMES
from unishard.checkpoint.chunks import Chunk
from unishard.checkpoint.files import open_file
from unishard.checkpoint.intervals import boxes
from unishard.distributed.dtypes import dtype_named, name_of
from unishard.errors import CheckpointError

FILE = "shards.index"
"""Its name in a checkpoint."""
_MAGIC = b"unishard-index-1\n"
_NUMBER = struct.Struct("<Q")
_ROW = struct.Struct("<4q")
_LARGEST_HEADER = 2**28


class _Tensor(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: str
    shape: list[int] = Field(max_length=MOST_DIMS)
    row: int = Field(ge=0)
    rows: int = Field(ge=1)


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    metadata: int
    """Size of torch's index that this one belongs to."""
    files: list[str]
    tensors: dict[str, _Tensor]


def bytes_of(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], rows: Mapping[str, Any], files: list[str], size: int
) -> bytes:
    """The content of an index.

    Args:
        tensors: Dtype and shape of each tensor.
        rows: The rows of each tensor, an array of integers, in any order.
        files: The files that the second number of a row counts.
        size: Size of torch's index in the same directory.
    """
    described, tables, begin = {}, [], 0
    for name, (dtype, shape) in tensors.items():
        table = np.asarray(rows[name], dtype="<i8").reshape(-1, 4)
        tables.append(table[np.argsort(table[:, 0], kind="stable")])
        described[name] = _Tensor.model_construct(dtype=name_of(dtype), shape=list(shape), row=begin, rows=len(table))
        begin += len(table)
    header = _Header.model_construct(metadata=size, files=files, tensors=described).model_dump_json().encode()
    header += b" " * (-(len(_MAGIC) + _NUMBER.size + len(header)) % _ROW.size)  # rows begin at a multiple of their size
    return b"".join([_MAGIC, _NUMBER.pack(len(header)), header, *(table.tobytes() for table in tables)])


def open_index(folder: Path) -> ShardIndex | None:
    """The index of a checkpoint; None if it has none, or one that does not belong to torch's index beside it.

    Raises:
        CheckpointError: It is damaged.
    """
    path = folder / FILE
    try:
        file = open_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    with file:
        try:
            rows = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            begin = len(_MAGIC) + _NUMBER.size
            (length,) = _NUMBER.unpack(rows[len(_MAGIC) : begin])
            if rows[: len(_MAGIC)] != _MAGIC or length > min(_LARGEST_HEADER, len(rows)):
                raise ValueError("it is of another format")
            header = _Header.model_validate_json(rows[begin : begin + length])
            index = ShardIndex(path, header, rows, begin + length)
        except (ValueError, struct.error, OSError, TypeError) as error:
            problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise CheckpointError(f"{path}: cannot be read ({problem}); it is damaged") from error
    return index if _size_of(folder / metadata.FILE) == header.metadata else None


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


class ShardIndex:
    """The rows of all tensors, in a file. Only the rows that a tensor needs are read."""

    def __init__(self, path: Path, header: _Header, rows: mmap.mmap, begin: int) -> None:
        """Open the rows.

        Raises:
            ValueError: They are fewer than the header says, or a value is none.
        """
        self._path, self._header, self._rows, self._begin = path, header, rows, begin
        self.shapes = {name: torch.Size(entry.shape) for name, entry in header.tensors.items()}
        self.dtypes = {name: dtype_named(entry.dtype) for name, entry in header.tensors.items()}
        self.looked_at = 0
        """Rows that were read."""
        last = max((entry.row + entry.rows for entry in header.tensors.values()), default=0)
        if begin + last * _ROW.size > len(rows):
            raise ValueError("it is truncated")
        if any(Path(name).name != name or not name.isprintable() for name in header.files):
            raise ValueError("a file lies outside the directory; do not trust this checkpoint")
        if any(min(shape, default=0) < 0 for shape in self.shapes.values()):
            raise ValueError("a shape is negative")
        if (
            not dist.is_initialized() or dist.get_rank() == 0
        ):  # a file system has enough to do with the look of one rank
            room = sum(entry.stat().st_size for entry in path.parent.iterdir() if entry.is_file())
            if (
                sum(shape.numel() * self.dtypes[name].itemsize for name, shape in self.shapes.items())
                > MOST_NAMES * room
            ):
                raise ValueError("its tensors are larger than all files")

    def row(self, number: int) -> tuple[int, int, int, int]:
        """A row, by its number in the file."""
        self.looked_at += 1
        first, file, at, length = _ROW.unpack_from(self._rows, self._begin + number * _ROW.size)
        return first, file, at, length

    def chunks(self, name: str, begin: int, end: int) -> Iterator[Chunk]:
        """See `ChunkTable`."""
        entry, shape = self._header.tensors[name], self.shapes[name]
        numbers = range(entry.row, entry.row + entry.rows)
        at = max(bisect_right(numbers, begin, key=lambda number: self.row(number)[0]) - 1, 0)
        row: tuple[int, int, int, int] | None = self.row(numbers[at])
        while row is not None and row[0] < end:
            following = self.row(numbers[at + 1]) if at + 1 < entry.rows else None
            yield self._chunk(name, shape, row, shape.numel() if following is None else following[0])
            at, row = at + 1, following

    def _chunk(self, name: str, shape: torch.Size, row: tuple[int, int, int, int], end: int) -> Chunk:
        first, file, at, length = row
        chunk_boxes = list(boxes(shape, first, end)) if 0 <= first < end <= shape.numel() else []
        if len(chunk_boxes) != 1 or not 0 <= file < len(self._header.files) or min(at, length) < 0:
            raise CheckpointError(
                f"{self._path}: {name} has a row that cannot be; it is damaged, use another checkpoint"
            )
        offsets, sizes = chunk_boxes[0]
        return Chunk(name, tuple(shape), offsets, sizes, self._header.files[file], at, length)
