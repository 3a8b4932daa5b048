"""Writes torch's index of a checkpoint, a pickle, from arrays.

`pickle` needs 20 us for each of the small objects of a chunk, 46 s for 70 billion parameters on 1,024 ranks. Here it
pickles one example of each kind, and the numbers of all others are put into copies of its bytes. What torch reads is
the same.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from unishard.checkpoint import index_classes
from unishard.checkpoint.assignment import Places
from unishard.checkpoint.box_tables import box_table
from unishard.checkpoint.holdings import StoredTensor

Numbers = NDArray[np.int64]
_PUTS, _GETS = ("BINPUT", "LONG_BINPUT"), ("BINGET", "LONG_BINGET")
_LIST, _CHUNKS, _PLACES = ("\0entries", "\0chunks", "\0places")
"""Stand in an example for what is put in their place."""
_WIDE, _NARROW = 0x7A5B3C2D1E6F4100, 0x7A5B3C00
"""Numbers of examples: pickled in 8 bytes, and in 4."""
_MANY = 1 << 16
"""Rows that are made at once."""


def pieces(
    tables: Sequence[tuple[str, int, Places]], files: Sequence[str], paths: Mapping[str, tuple[str, ...]]
) -> Iterator[bytes]:
    """The index in pieces.

    Args:
        tables: A name of each tensor, its number in a table, and the table.
        files: The files that the ranks have written.
        paths: Where torch puts each tensor if it rebuilds nested dictionaries.
    """
    names = [name for name, *_ in tables]
    stream = _Stream()
    yield b"\x80\x03"
    for shared in _examples(names, tables):
        yield stream.code(shared) + pickle.POP
    yield b"".join(stream.code(name) + pickle.POP for name in names)
    memo = []
    for file in files:
        code = stream.code(file)
        memo.append(stream.last_put(code))
        yield code + pickle.POP
    whole = stream.code(index_classes.index_of(_LIST, {name: paths[name] for name in names}, _PLACES))
    before, rest = _around(whole, _LIST)
    between, after = _around(rest, _PLACES)
    yield before + pickle.EMPTY_DICT + pickle.MARK
    for name, number, places in tables:
        yield from _entry(stream, name, places.tensors[number], places.of(number))
    yield pickle.SETITEMS + between + pickle.EMPTY_DICT
    for name, number, places in tables:
        yield from _positions(stream, name, places.tensors[number], places.of(number), files[0], np.array(memo))
    yield after + pickle.STOP


def _examples(names: Sequence[str], tables: Sequence[tuple[str, int, Places]]) -> Iterator[Any]:
    """Objects with all classes, dtypes and attributes, to which the following ones refer."""
    dtypes = {places.tensors[number].dtype: None for _, number, places in tables}
    for dtype in dtypes:
        yield TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size((1,)), [])
    yield ChunkStorageMetadata(torch.Size((1,)), torch.Size((1,)))
    yield MetadataIndex(names[0] if names else "", torch.Size((1,)), 1)
    yield index_classes.place("", 1, 1)


def _entry(stream: _Stream, name: str, tensor: StoredTensor, columns: Sequence[Numbers]) -> Iterator[bytes]:
    """A name, and what the index says of the tensor."""
    first, last, *_ = columns
    chunks: Any = (
        _CHUNKS.encode().decode()
    )  # another object each time: the second one would be a reference to the first
    before, after = _around(
        stream.code(TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks)),
        chunks,
    )
    yield stream.code(name) + before + pickle.EMPTY_LIST + pickle.MARK
    dims = len(tensor.shape)
    for rows in _slices(len(first)):
        boxes = box_table(tensor.shape, first[rows], last[rows], tensor.order)
        numbers = np.concatenate([boxes.offsets, boxes.sizes], axis=1)

        def example(number: int) -> Any:
            offsets, sizes = (torch.Size(number + begin + dim for dim in range(dims)) for begin in (0, dims))
            return ChunkStorageMetadata(offsets, sizes)

        yield stream.filled(example, numbers)
    yield pickle.APPENDS + after


def _positions(
    stream: _Stream, name: str, tensor: StoredTensor, columns: Sequence[Numbers], file: str, memo: Numbers
) -> Iterator[bytes]:
    """The boxes of a tensor, and where each lies."""
    first, last, rank, at, length = columns
    dims = len(tensor.shape)
    for rows in _slices(len(first)):
        offsets = box_table(tensor.shape, first[rows], last[rows], tensor.order).offsets
        row = np.arange(rows.start, rows.start + len(offsets))
        numbers = np.column_stack([offsets, row, at[rows], length[rows]])

        def example(number: int) -> tuple[Any, Any]:
            index = MetadataIndex(name, torch.Size(number + dim for dim in range(dims)), number + dims)
            return index, index_classes.place(file, number + dims + 1, number + dims + 2)

        code = stream.filled(example, numbers, (memo[0], memo[rank[rows]]))
        yield pickle.MARK + code + pickle.SETITEMS


def _slices(rows: int) -> Iterator[slice]:
    return (slice(begin, min(begin + _MANY, rows)) for begin in range(0, rows, _MANY))


class _Stream:
    """Pickles objects one after another; the later ones refer to parts of the earlier ones."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        self._pickler = pickle.Pickler(
            self._buffer, 3
        )  # later protocols number what can be referred to by its place in the file

    def code(self, value: Any) -> bytes:
        """The bytes that push an object."""
        self._buffer.seek(0)
        self._buffer.truncate()
        self._pickler.dump(value)
        return self._buffer.getvalue()[2:-1]

    def last_put(self, code: bytes) -> int:
        """The number by which later code refers to an object."""
        return next(
            int(value)
            for operation, value, _ in reversed([*pickletools.genops(code + pickle.STOP)])
            if operation.name in _PUTS
        )

    def filled(self, example: Any, numbers: Numbers, files: tuple[int, Numbers] | None = None) -> bytes:
        """Code of one object, or of several, for each row of numbers.

        Args:
            example: Makes the objects from the first of some numbers that follow each other, which stand for the
                columns.
            numbers: Rows, and a column for each number.
            files: The number by which the example refers to its file, and that of each row.
        """
        narrow = bool(numbers.max(initial=0) < 1 << 31)
        first, number = (_NARROW, "<i4") if narrow else (_WIDE, "<i8")
        made = example(first)
        code = b"".join(map(self.code, made if isinstance(made, tuple) else (made,)))
        code, slot = _without_puts(code, None if files is None else files[0])
        marks = [struct.pack("<i" if narrow else "<q", first + column) for column in range(numbers.shape[1])]
        fields: dict[str, tuple[str, int]] = {
            f"n{column}": (number, code.index(mark)) for column, mark in enumerate(marks)
        }
        if slot is not None:
            fields["file"] = ("<u4", slot)
        row = np.dtype(
            {
                "names": [*fields],
                "formats": [kind for kind, _ in fields.values()],
                "offsets": [offset for _, offset in fields.values()],
                "itemsize": len(code),
            }
        )
        filled = np.frombuffer(bytearray(code * len(numbers)), row)
        for column in range(numbers.shape[1]):
            filled[f"n{column}"] = numbers[:, column]
        if files is not None:
            filled["file"] = files[1]
        return filled.tobytes()


def _without_puts(code: bytes, file: int | None) -> tuple[bytes, int | None]:
    """Code without the opcodes that let later code refer to it, and the offset of the file's number, in 4 bytes."""
    operations = [*pickletools.genops(code + pickle.STOP)]
    rewritten, slot = bytearray(), None
    for (operation, value, begin), (*_, end) in pairwise(operations):
        if operation.name in _GETS and value == file:
            slot = len(rewritten) + 1
            rewritten += pickle.LONG_BINGET + struct.pack("<I", value)
        elif operation.name not in _PUTS:
            rewritten += code[begin:end]
    return bytes(rewritten), slot


def _around(code: bytes, text: str) -> tuple[bytes, bytes]:
    """The code before and after that of a text, which is its opcode, its length, the text, and the number of its memo
    entry.
    """
    place = code.index(text.encode())
    after = place + len(text)
    return code[: place - 5], code[after + {pickle.BINPUT: 2, pickle.LONG_BINPUT: 5}[code[after : after + 1]] :]
