"""What the first rank does in a save beside writing its own shards: it plans who writes what, and writes the index.

It may do so in a child process: see `planning_process.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unishard.checkpoint import index_file, tensor_names
from unishard.checkpoint.assignment import Assignment, Places
from unishard.checkpoint.direct_file import DirectFile
from unishard.checkpoint.disk import fsync
from unishard.checkpoint.metadata import FILE
from unishard.distributed.dtypes import name_of

Packed = tuple[bytes, bytes]
"""What a rank holds, as `holdings.packed` makes it."""


class RankResult(NamedTuple):
    """What a rank has written, in two parts: what is the same in each save, and the rest."""

    file: str
    size: int
    crc: int
    lengths: list[Any]
    """Of the records of each part; None if they are those of the save before."""
    hashes: list[Any]
    """What this rank adds to the hash of each tensor that it holds."""
    squares: list[Any]


class SaveResult(NamedTuple):
    """What all ranks have written."""

    files: dict[str, tuple[int, int]]
    """Size and CRC-32 of each file."""
    hashes: dict[str, int]
    """Hash of each tensor."""
    squares: dict[str, float]
    """Sum of squares of each floating-point tensor, computed in fp32, or in fp64 of fp64."""
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]


class Planning:
    """Plans a save, writes its index, and keeps the plan and the lengths of all records for the next save of the same
    tensors.
    """

    def __init__(self) -> None:
        self.assignments: list[Assignment] = []
        """Of each part."""
        self._lengths: list[Any] = []
        """Of the records of the first part, by rank, from the save that was planned."""

    def plan(self, chunk: int, everyone: Sequence[tuple[Packed | None, Packed]]) -> list[tuple[bytes | None, bytes]]:
        """Plan a save.

        Args:
            chunk: Bytes of the intervals that are written as one.
            everyone: What each rank holds of the two parts; None of the first one on all ranks if the last plan of it
                holds.

        Returns:
            For each rank, which of its cuts of each part it writes, in bits; None where the last plan holds.

        Raises:
            ValueError: The shards do not cover the tensors, or overlap.
        """
        lasting, changing = zip(*everyone, strict=True)
        if lasting[0] is not None:
            self.assignments, self._lengths = [Assignment(lasting, chunk)], []
            first: Sequence[bytes | None] = self.assignments[0].masks
        else:
            first = [None] * len(everyone)
        self.assignments[1:] = [Assignment(changing, chunk)]
        return list(zip(first, self.assignments[1].masks, strict=True))

    def finish(self, folder: Path, ties: Mapping[str, str], ranks: Sequence[RankResult]) -> SaveResult:
        """Write the index of a save, once all ranks have written their shards.

        Args:
            folder: The checkpoint.
            ties: Other names of tensors, to those under which they are stored.
            ranks: What each rank has written.

        Raises:
            OSError: The index could not be written.
            ValueError: A rank has written another number of records.
        """
        lasting, changing = ([result.lengths[part] for result in ranks] for part in (0, 1))
        lasting = [self._lengths[rank] if counts is None else counts for rank, counts in enumerate(lasting)]
        first, second = self.assignments
        tables = [
            first.places(lasting, [0] * len(ranks)),
            second.places(changing, [int(counts.sum()) for counts in lasting]),
        ]
        self._lengths = self._lengths or lasting
        entries = [(tensor.name, number, places) for places in tables for number, tensor in enumerate(places.tensors)]
        stored = {name: (number, places) for name, number, places in entries}
        entries += [(alias, *stored[name]) for alias, name in ties.items()]
        files = {result.file: (result.size, result.crc) for result in ranks}
        files[FILE] = _put_index(folder, entries, [*files])
        hashes, squares = _sums(self.assignments, ranks)
        hashes |= {alias: hashes[name] for alias, name in ties.items()}
        kinds = {name: places.tensors[number] for name, number, places in entries}
        shapes, dtypes = (
            {name: tensor.shape for name, tensor in kinds.items()},
            {name: name_of(tensor.dtype) for name, tensor in kinds.items()},
        )
        return SaveResult(files, hashes, squares, shapes, dtypes)


def _put_index(folder: Path, entries: list[tuple[str, int, Places]], files: list[str]) -> tuple[int, int]:
    """Write torch's index: its size and CRC-32."""
    paths = {name: _path(name) for name, *_ in entries}
    with DirectFile(folder / f"{FILE}.tmp") as file:
        for piece in index_file.pieces(entries, files, paths):
            file.write(piece)
    (folder / f"{FILE}.tmp").rename(folder / FILE)
    fsync(folder)
    return file.size, file.crc


def _path(name: str) -> tuple[str, ...]:
    """The path of an entry, from which torch rebuilds nested dictionaries; names of parameters contain dots
    themselves.
    """
    if part := tensor_names.optimizer_part(name):
        return (*tensor_names.OPTIMIZER.rstrip(".").split("."), *part)
    head, _, rest = name.partition(".")
    return (head, rest)


def _sums(assignments: Sequence[Assignment], ranks: Sequence[RankResult]) -> tuple[dict[str, int], dict[str, float]]:
    """The hash of each tensor, and the sum of squares of each floating-point tensor, added up over all ranks."""
    hashes: dict[str, int] = {}
    squares: dict[str, float] = {}
    for part, assignment in enumerate(assignments):
        tensors = assignment.tensors
        both = (
            assignment.added([result.hashes[part] for result in ranks]),
            assignment.added([result.squares[part] for result in ranks]),
        )
        hashes |= {tensor.name: value for tensor, value in zip(tensors, both[0], strict=True)}
        squares |= {
            tensor.name: value for tensor, value in zip(tensors, both[1], strict=True) if tensor.dtype.is_floating_point
        }
    return hashes, squares
