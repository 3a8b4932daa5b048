"""Reads the tensors of a torch.distributed.checkpoint directory chunk by chunk, in one process, without an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

from unishard.checkpoint import metadata
from unishard.checkpoint.archives import read_through
from unishard.checkpoint.intervals import runs
from unishard.checkpoint.lazy_shards import LazyShard
from unishard.checkpoint.regular_file import open_file
from unishard.errors import CheckpointError

__all__ = ["ReadRequest", "Tensors"]


class ReadRequest(NamedTuple):
    """Memory to read a flat range of a tensor into."""

    name: str
    """In the checkpoint."""
    start: int
    """First element, in the flattened tensor."""
    values: Tensor
    """The flat destination, of any dtype on any device; is written to."""


class _Chunk(NamedTuple):
    """A box of a tensor as it is stored in a file."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    length: int


class Tensors:
    """The tensors of a directory. Opening it reads only the index."""

    def __init__(self, folder: Path, *, verify: bool = False) -> None:
        """Open a directory.

        Args:
            folder: The directory.
            verify: Whether to check the checksums in it while reading, for one that has no manifest.

        Raises:
            CheckpointError: It has no index, or a damaged one.
        """
        self.folder = folder
        self._verify = verify
        index = metadata.read(folder)
        self.shapes: Mapping[str, torch.Size] = {}
        """Of each tensor."""
        self.dtypes: Mapping[str, torch.dtype] = {}
        """Of each tensor."""
        self.others: frozenset[str] = frozenset(
            name for name, entry in index.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)
        )
        """Names of entries that are not tensors: pickles, which are never opened."""
        self._chunks: dict[str, list[_Chunk]] = {}
        for name, entry in index.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                self._add(name, entry, index.storage_data)

    def __contains__(self, name: str) -> bool:
        return name in self._chunks

    def __iter__(self) -> Iterator[str]:
        return iter(self._chunks)

    def stretch(self, name: str) -> LazyShard:
        """A full tensor, read on demand.

        Raises:
            CheckpointError: There is no such tensor.
        """
        self._of(name)

        def read(begin: int, end: int) -> Tensor:
            values = torch.empty(end - begin, dtype=self.dtypes[name])
            self.read([ReadRequest(name, begin, values)])
            return values

        shape = self.shapes[name]
        return LazyShard(shape, self.dtypes[name], 0, shape.numel(), read)

    def full(self, name: str) -> Tensor:
        """A full tensor in host memory."""
        stretch = self.stretch(name)
        return stretch.read(0, stretch.end).view(stretch.shape)

    @torch.no_grad()
    def read(self, targets: Iterable[ReadRequest], progress: Callable[[int], None] = lambda read: None) -> None:
        """Read into memory. Each chunk that is needed is read once, in file order.

        Args:
            targets: The memory to fill.
            progress: Called with the size of each chunk in bytes.

        Raises:
            CheckpointError: A tensor does not exist, or a file is missing, truncated or damaged.
        """
        wanted: dict[_Chunk, list[tuple[ReadRequest, int, int, int]]] = {}
        for target in targets:
            filled = 0
            for chunk in self._of(target.name):
                for inside, into, length in _common(chunk, target):
                    wanted.setdefault(chunk, []).append((target, inside, into, length))
                    filled += length
            if filled != target.values.numel():
                raise CheckpointError(f"{self.folder}: {target.name} is incomplete; use another checkpoint")
        opened: tuple[str, IO[bytes]] | None = None
        try:
            for chunk in sorted(wanted, key=lambda each: (each.file, each.at)):
                if opened is None or opened[0] != chunk.file:
                    if opened is not None:
                        opened[1].close()
                    opened = (chunk.file, self._open(chunk))
                values = self._load(chunk, opened[1])
                for target, inside, into, length in wanted[chunk]:
                    target.values[into : into + length].copy_(values[inside : inside + length])
                progress(chunk.length)
        finally:
            if opened is not None:
                opened[1].close()

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _add(self, name: str, entry: TensorStorageMetadata, places: Mapping[MetadataIndex, Any]) -> None:
        chunks = []
        for chunk in entry.chunks:
            place = places.get(MetadataIndex(name, chunk.offsets))
            if place is None or getattr(place, "transform_descriptors", None):
                raise CheckpointError(f"{self.folder}: {name} has a missing or encoded chunk, which this version cannot read")
            if Path(place.relative_path).name != place.relative_path:
                raise CheckpointError(
                    f"{self.folder}: {name} lies outside the directory ({place.relative_path}); do not trust this checkpoint"
                )
            chunks.append(
                _Chunk(name, tuple(entry.size), tuple(chunk.offsets), tuple(chunk.sizes), place.relative_path, place.offset, place.length)
            )
        self.shapes[name], self.dtypes[name] = torch.Size(entry.size), entry.properties.dtype  # type: ignore[index]
        self._chunks[name] = chunks

    def _of(self, name: str) -> list[_Chunk]:
        try:
            return self._chunks[name]
        except KeyError:
            raise CheckpointError(f"{self.folder}: no tensor {name!r}; list them with `unishard checkpoint inspect`") from None

    def _open(self, chunk: _Chunk) -> IO[bytes]:
        try:
            return open_file(self.folder / chunk.file)
        except OSError as error:
            raise CheckpointError(f"{self.folder / chunk.file}: {error.strerror}; the checkpoint is incomplete") from error

    def _load(self, chunk: _Chunk, file: IO[bytes]) -> Tensor:
        record: Any = _Window(file, chunk.at, chunk.length)
        if self._verify:
            for _ in read_through(record, f"{self.folder / chunk.file}: {chunk.name}"):
                pass
            record.seek(0)
        try:
            values = torch.load(record, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged archive can raise anything
            raise CheckpointError(f"{self.folder / chunk.file}: {chunk.name} cannot be read ({error}); the file is damaged") from error
        if not isinstance(values, Tensor) or tuple(values.shape) != chunk.sizes:
            raise CheckpointError(f"{self.folder / chunk.file}: {chunk.name} does not have the shape in the index; the file is damaged")
        return values.reshape(-1)


def _common(chunk: _Chunk, target: ReadRequest) -> Iterator[tuple[int, int, int]]:
    """The overlaps of a chunk and a target: offset in the chunk, offset in the target, length."""
    begin, end = target.start, target.start + target.values.numel()
    if chunk.sizes and 0 not in chunk.sizes:
        strides = [math.prod(chunk.shape[dim + 1 :]) for dim in range(len(chunk.shape))]
        first = sum(offset * stride for offset, stride in zip(chunk.offsets, strides, strict=True))
        last = sum((offset + size - 1) * stride for offset, size, stride in zip(chunk.offsets, chunk.sizes, strides, strict=True))
        if first >= end or last < begin:
            return
    for at, inside, length in runs(chunk.shape, chunk.offsets, chunk.sizes):
        low, high = max(at, begin), min(at + length, end)
        if low < high:
            yield inside + low - at, low - begin, high - low


class _Window:
    """A byte range of a file, as a file object."""

    def __init__(self, file: IO[bytes], at: int, length: int) -> None:
        self._file, self._at, self._length, self._place = file, at, length, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = (0, self._place, self._length)[whence] + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._place)
        self._file.seek(self._at + self._place)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._place += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = memoryview(buffer).cast("B")
        self._file.seek(self._at + self._place)
        count: int = self._file.readinto(data[: max(0, self._length - self._place)])  # type: ignore[attr-defined]
        self._place += count
        return count

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
