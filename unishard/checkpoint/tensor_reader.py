"""Reads the tensors of a torch.distributed.checkpoint directory chunk by chunk, in one process, without an engine."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from unishard.checkpoint import metadata
from unishard.checkpoint.archives import read_through
from unishard.checkpoint.chunks import Chunk, SortedChunks
from unishard.checkpoint.files import open_file
from unishard.checkpoint.inside_folder import OutsideFolderError, file_inside
from unishard.distributed.boxes import Box, inside, overlap, span
from unishard.distributed.lazy_shards import LazyShard
from unishard.distributed.slice_order import MEMORY_ORDER, SliceOrder
from unishard.errors import CheckpointError


class ReadRequest(NamedTuple):
    """Memory to read an interval of a tensor into."""

    name: str
    """In the checkpoint."""
    start: int
    """First element."""
    values: Tensor
    """The flat destination, of any dtype on any device; is written to."""
    order: SliceOrder = MEMORY_ORDER
    """How the elements are counted."""


class _ChunkPart(NamedTuple):
    """A part of a chunk that is needed."""

    chunk: Chunk
    box: Box
    values: Tensor
    """Where it is copied to, of the same sizes."""


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
        entries = index.state_dict_metadata
        self._tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        self._places: Mapping[MetadataIndex, Any] = index.storage_data
        self.others = frozenset(entries.keys() - self._tensors.keys())
        """Names of entries that are not tensors: pickles, which are never opened."""
        self.shapes = {name: entry.size for name, entry in self._tensors.items()}
        self.dtypes = {name: entry.properties.dtype for name, entry in self._tensors.items()}
        self._sorted: dict[str, SortedChunks] = {}
        self._sizes: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def lazy(self, name: str) -> LazyShard:
        """A full tensor that is read on demand.

        Raises:
            CheckpointError: There is no such tensor.
        """
        self._require(name)
        for chunk in self._chunks(name, 0, self.shapes[name].numel()):
            self._require_room(chunk)

        def read(begin: int, end: int) -> Tensor:
            values = torch.empty(end - begin, dtype=self.dtypes[name])
            self.read([ReadRequest(name, begin, values)])
            return values

        shape = self.shapes[name]
        return LazyShard(shape, self.dtypes[name], 0, shape.numel(), read)

    def full(self, name: str) -> Tensor:
        """A full tensor in host memory."""
        tensor = self.lazy(name)
        return tensor.read(0, tensor.end).view(tensor.shape)

    def require(self, name: str, shape: Sequence[int], interval: range, order: SliceOrder = MEMORY_ORDER) -> None:
        """Check that a part of a tensor can be read, by the index and the sizes of the files; reads no element.

        Args:
            name: The tensor.
            shape: The shape that it must have.
            interval: Of its elements.
            order: How these are counted.

        Raises:
            CheckpointError: It does not exist, has another shape, or is incomplete.
        """
        self._require(name)
        if tuple(shape) != tuple(self.shapes[name]):
            raise CheckpointError(
                f"{self.folder}: {name} has shape {tuple(self.shapes[name])} in the index, not {tuple(shape)}; the "
                "checkpoint is damaged"
            )
        available = 0
        for part in self._parts(ReadRequest(name, interval.start, torch.empty(len(interval), device="meta"), order)):
            if part.chunk.file not in self._sizes:
                self._open(part.chunk).close()
            self._require_room(part.chunk)
            available += part.values.numel()
        if available != len(interval):
            raise CheckpointError(f"{self.folder}: {name} is incomplete; use another checkpoint")

    @torch.no_grad()
    def read(self, targets: Iterable[ReadRequest], progress: Callable[[int], None] = lambda read: None) -> None:
        """Read into memory. Each chunk that is needed is read once, in file order.

        Args:
            targets: The memory to fill.
            progress: Called with the size of each chunk in bytes.

        Raises:
            CheckpointError: A tensor does not exist, or a file is missing, truncated or damaged.
        """
        wanted: dict[Chunk, list[_ChunkPart]] = {}
        for target in targets:
            self._require(target.name)
            filled = 0
            for part in self._parts(target):
                wanted.setdefault(part.chunk, []).append(part)
                filled += part.values.numel()
            if filled != target.values.numel():
                raise CheckpointError(f"{self.folder}: {target.name} is incomplete; use another checkpoint")
        opened: tuple[str, IO[bytes]] | None = None
        try:
            for chunk in sorted(wanted, key=lambda chunk: (chunk.file, chunk.at)):
                if opened is None or opened[0] != chunk.file:
                    if opened is not None:
                        opened[1].close()
                    opened = (chunk.file, self._open(chunk))
                values = self._load(chunk, opened[1])
                for part in wanted[chunk]:
                    part.values.copy_(inside(values, (chunk.offsets, chunk.sizes), part.box))
                progress(chunk.length)
        finally:
            if opened is not None:
                opened[1].close()

    # -- inside ------------------------------------------------------------------------------------

    def _parts(self, target: ReadRequest) -> Iterator[_ChunkPart]:
        """The parts of chunks that make up a target."""
        shape = self.shapes[target.name]
        for held in target.order.boxes(shape, target.start, target.start + target.values.numel()):
            values = target.values[held.first - target.start : held.last - target.start]
            first, last = span(shape, held.box)
            for chunk in self._chunks(target.name, first, last + 1):
                if (box := overlap((chunk.offsets, chunk.sizes), held.box)) is not None:
                    yield _ChunkPart(chunk, box, inside(values, held.box, box))

    def _chunks(self, name: str, begin: int, end: int) -> Sequence[Chunk]:
        """Those that may hold elements of an interval of a flattened tensor."""
        if name not in self._sorted:
            self._sorted[name] = SortedChunks(self._listed(name))
        return self._sorted[name].within(begin, end)

    def _listed(self, name: str) -> Iterator[Chunk]:
        """The chunks of a tensor in the index."""
        entry = self._tensors[name]
        for chunk in entry.chunks:
            place = self._places.get(MetadataIndex(name, chunk.offsets))
            if place is None or getattr(place, "transform_descriptors", None):
                raise CheckpointError(
                    f"{self.folder}: {name} has a missing or encoded chunk, which this version cannot read"
                )
            if Path(place.relative_path).name != place.relative_path:
                raise CheckpointError(
                    f"{self.folder}: {name} lies outside the directory ({place.relative_path}); do not trust this "
                    "checkpoint"
                )
            yield Chunk(
                name,
                tuple(entry.size),
                tuple(chunk.offsets),
                tuple(chunk.sizes),
                place.relative_path,
                place.offset,
                place.length,
            )

    def _require(self, name: str) -> None:
        if name not in self.shapes:
            raise CheckpointError(f"{self.folder}: no tensor {name!r}; list them with `unishard checkpoint inspect`")

    def _require_room(self, chunk: Chunk) -> None:
        """Check that a chunk is no larger than its file, before anyone plans with its size.

        A file that cannot be read says so later.
        """
        if chunk.file not in self._sizes:
            path = self.folder / chunk.file
            self._sizes[chunk.file] = path.stat().st_size if path.is_file() else sys.maxsize
        size = math.prod(chunk.sizes) * self.dtypes[chunk.name].itemsize
        if size > chunk.length or chunk.at + chunk.length > self._sizes[chunk.file]:
            raise CheckpointError(
                f"{self.folder / chunk.file}: holds less than the {size} bytes of {chunk.name}; it is damaged"
            )

    def _open(self, chunk: Chunk) -> IO[bytes]:
        try:
            return open_file(file_inside(self.folder, chunk.file))
        except OutsideFolderError as error:
            raise CheckpointError(
                f"{self.folder}: {error}; do not trust this checkpoint, or put the file into it"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"{self.folder / chunk.file}: {error.strerror}; the checkpoint is incomplete"
            ) from error

    def _load(self, chunk: Chunk, file: IO[bytes]) -> Tensor:
        self._require_room(chunk)
        record: Any = _Window(file, chunk.at, chunk.length)
        path = self.folder / chunk.file
        if self._verify:
            for _ in read_through(record, f"{path}: {chunk.name}"):
                pass
        try:
            values = torch.load(record, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged archive can raise anything
            raise CheckpointError(
                f"{path}: {chunk.name} cannot be read ({error!s:.200}); the file is damaged"
            ) from error
        if not isinstance(values, Tensor) or tuple(values.shape) != chunk.sizes:
            raise CheckpointError(f"{path}: {chunk.name} does not have the shape in the index; the file is damaged")
        return values.reshape(-1)


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
