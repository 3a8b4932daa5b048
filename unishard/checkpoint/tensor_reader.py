"""The tensors of a torch.distributed.checkpoint directory, read piece by piece, by one process, without an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

from unishard.checkpoint import metadata
from unishard.checkpoint.intervals import runs
from unishard.checkpoint.lazy_shards import LazyShard
from unishard.errors import CheckpointError

__all__ = ["ReadRequest", "Tensors"]


class ReadRequest(NamedTuple):
    """Memory that wants a stretch of a tensor."""

    name: str
    """In the checkpoint."""
    start: int
    """Where the stretch begins in the flattened tensor."""
    values: Tensor
    """Flat, any dtype and device; it is written to."""


class _Chunk(NamedTuple):
    """A box of a tensor as it lies in a file."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    length: int


class Tensors:
    """The tensors of a directory. Opening reads its index alone."""

    def __init__(self, folder: Path) -> None:
        """Open a directory.

        Raises:
            CheckpointError: It has no index, or a damaged one.
        """
        self.folder = folder
        index = metadata.read(folder)
        self.shapes: Mapping[str, torch.Size] = {}
        """Of each tensor."""
        self.dtypes: Mapping[str, torch.dtype] = {}
        """Of each tensor."""
        self.others: frozenset[str] = frozenset(
            name for name, entry in index.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)
        )
        """Names of what is no tensor: pickles, which are never opened."""
        self._chunks: dict[str, list[_Chunk]] = {}
        for name, entry in index.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                self._add(name, entry, index.storage_data)

    def __contains__(self, name: str) -> bool:
        return name in self._chunks

    def __iter__(self) -> Iterator[str]:
        return iter(self._chunks)

    def stretch(self, name: str) -> LazyShard:
        """A whole tensor, to be read when and where it is needed.

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

    def whole(self, name: str) -> Tensor:
        """A whole tensor in host memory."""
        stretch = self.stretch(name)
        return stretch.read(0, stretch.end).view(stretch.shape)

    @torch.no_grad()
    def read(self, targets: Iterable[ReadRequest], progress: Callable[[int], None] = lambda read: None) -> None:
        """Fill memory. Each chunk of the files that is needed is read once, in the order of the files.

        Args:
            targets: What to fill.
            progress: Called with the bytes of each chunk.

        Raises:
            CheckpointError: There is no such tensor, or a file is missing, too short or damaged.
        """
        wanted: dict[_Chunk, list[tuple[ReadRequest, int, int, int]]] = {}
        for target in targets:
            filled = 0
            for chunk in self._of(target.name):
                for inside, into, length in _common(chunk, target):
                    wanted.setdefault(chunk, []).append((target, inside, into, length))
                    filled += length
            if filled != target.values.numel():
                raise CheckpointError(f"{self.folder}: {target.name} has gaps; write the checkpoint again")
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
                raise CheckpointError(
                    f"{self.folder}: {name} is stored in a way that this version does not read (a missing or encoded chunk)"
                )
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
            raise CheckpointError(f"{self.folder}: there is no tensor {name!r}; see `unishard checkpoint inspect`") from None

    def _open(self, chunk: _Chunk) -> IO[bytes]:
        try:
            return (self.folder / chunk.file).open("rb")
        except OSError as error:
            raise CheckpointError(f"{self.folder / chunk.file}: {error.strerror}; the checkpoint is incomplete") from error

    def _load(self, chunk: _Chunk, file: IO[bytes]) -> Tensor:
        try:
            values = torch.load(_Window(file, chunk.at, chunk.length), map_location="cpu", weights_only=True)  # type: ignore[arg-type]
        except Exception as error:  # a damaged archive fails in any way
            raise CheckpointError(f"{self.folder / chunk.file}: {chunk.name} cannot be read ({error}); the file is damaged") from error
        if not isinstance(values, Tensor) or tuple(values.shape) != chunk.sizes:
            raise CheckpointError(f"{self.folder / chunk.file}: {chunk.name} has another shape than the index says; the file is damaged")
        return values.reshape(-1)


def _common(chunk: _Chunk, target: ReadRequest) -> Iterator[tuple[int, int, int]]:
    """What a chunk has of what is wanted: where in the chunk, where in the target, how much."""
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
    """A stretch of a file as a file of its own."""

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
