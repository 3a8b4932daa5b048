"""Writes sharded tensors as one torch.distributed.checkpoint directory, with checksums of its files and hashes of its tensors.

Every rank writes its own shards without copying them; ranks that hold the same shard divide it between them. Nothing is gathered.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from unishard.checkpoint import dcp, keys, shard_index
from unishard.checkpoint.direct_file import BUFFER, DirectFile
from unishard.checkpoint.disk import fsync
from unishard.checkpoint.hashing import MASK, hash_of
from unishard.checkpoint.intervals import boxes
from unishard.checkpoint.lazy_shards import LazyShard
from unishard.checkpoint.metadata import FILE
from unishard.checkpoint.records import envelope_of
from unishard.distributed.dtypes import name_of
from unishard.distributed.interrupts import share
from unishard.distributed.shards import norm_of
from unishard.errors import CheckpointError

__all__ = ["Written", "write"]

CHUNK = 1 << 24
"""Bytes of a chunk. A reader always reads entire chunks."""

Advance = Callable[[int], None]
"""Called with the number of further bytes written."""


class Written(NamedTuple):
    """What all ranks have written."""

    files: dict[str, tuple[int, int]]
    """Size and CRC-32 of each file."""
    hashes: dict[str, int]
    """Hash of each tensor."""
    squares: dict[str, float]
    """Sum of squares of each floating-point tensor, computed in fp32, or in fp64 of fp64."""
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]


def write(
    folder: Path,
    stretches: Mapping[str, LazyShard],
    *,
    ties: Mapping[str, str] | None = None,
    group: dist.ProcessGroup | None = None,
    advance: Advance = lambda written: None,
    own_index: bool = True,
) -> Written | None:
    """Write a directory. Collective if torch.distributed is initialized.

    Args:
        folder: Empty or nonexistent; the same on all ranks.
        stretches: This rank's shard of each tensor, by the tensor's name in the checkpoint. Several ranks may hold the same shard.
        ties: Other names of tied tensors, to the names under which they are stored; readers find both.
        group: A process group with a CPU backend; None for the default group.
        advance: Called with this rank's progress.
        own_index: Whether to write our own index beside torch's, from which ranks read only what they need.

    Returns:
        What was written, on rank 0; None on the others.

    Raises:
        CheckpointError: On every rank: one of them could not write its file, or the shards do not cover the tensors.
    """
    single = not dist.is_initialized()
    writer = _Writer(folder, ties or {}, advance, own_index=own_index)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # because of `no_dist`, as intended
            save({}, storage_writer=writer, planner=_Planner(stretches), process_group=group, no_dist=single)
    except (CheckpointException, OSError, ValueError) as error:
        _raise_own_interrupt(error, 0 if single else dist.get_rank(group))
        raise CheckpointError(f"{folder}: {_cause(error)}") from error
    mine = (writer.files, dict(writer.hashes), dict(writer.squares))
    if single:
        return _merged([mine], writer)
    everyone: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(mine, everyone, group=group, group_dst=0)
    return None if everyone is None else _merged(everyone, writer)


def _raise_own_interrupt(error: BaseException, rank: int) -> None:
    """Raise this rank's KeyboardInterrupt or SystemExit, which torch reports as a failure to write (torch 2.13, checkpoint/utils.py)."""
    own, _ = error.failures.get(rank, (None, None)) if isinstance(error, CheckpointException) else (None, None)
    if own is not None and not isinstance(own, Exception):
        raise share(own) from None


def _merged(everyone: list[tuple[dict[str, tuple[int, int]], dict[str, int], dict[str, float]]], writer: _Writer) -> Written:
    files: dict[str, tuple[int, int]] = {}
    hashes: dict[str, int] = {}
    squares: dict[str, float] = {}
    for theirs, parts, sums in everyone:
        files |= theirs
        for name, part in parts.items():
            hashes[name] = (hashes.get(name, 0) + part) & MASK
        for name, part_of_sum in sums.items():
            squares[name] = squares.get(name, 0.0) + part_of_sum
    hashes |= {alias: hashes[name] for alias, name in writer.ties.items()}
    return Written(files, hashes, squares, writer.shapes, writer.dtypes)


def _cause(error: BaseException) -> str:
    """The error message of the first rank that failed, from what torch.distributed.checkpoint raises on all ranks."""
    if not isinstance(error, CheckpointException):
        return str(error)
    rank, (cause, _) = next(iter(sorted(error.failures.items())))
    return f"rank {rank} could not write its shards: {str(cause) or type(cause).__name__}"  # a KeyboardInterrupt has no message


class _Planner(DefaultSavePlanner):
    """Plans this rank's boxes; the base class deduplicates them across ranks and checks that nothing is missing."""

    def __init__(self, stretches: Mapping[str, LazyShard]) -> None:
        super().__init__()
        self._stretches = stretches

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [item for name, stretch in self._stretches.items() for item in _items(name, stretch)]
        paths = {name: _path(name) for name in self._stretches}
        self.plan = dataclasses.replace(plan, items=items, planner_data=paths)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        # torch checks for missing elements only if several ranks write, and never for missing tensors (torch 2.13).
        for name in metadata.planner_data:
            entry = metadata.state_dict_metadata.get(name)
            held = sum(chunk.sizes.numel() for chunk in entry.chunks) if isinstance(entry, TensorStorageMetadata) else 0
            if not isinstance(entry, TensorStorageMetadata) or held != entry.size.numel():
                raise ValueError(f"no rank holds some or all elements of {name}")
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        stretch, data = self._stretches[write_item.index.fqn], write_item.tensor_data
        assert data is not None
        begin = _start(write_item)
        return stretch.read(begin, begin + data.chunk.sizes.numel()).view(data.chunk.sizes)


def _start(item: WriteItem) -> int:
    """Offset of its box in the flattened tensor."""
    data = item.tensor_data
    assert data is not None
    return sum(offset * math.prod(data.size[dim + 1 :]) for dim, offset in enumerate(data.chunk.offsets))


def _items(name: str, stretch: LazyShard) -> list[WriteItem]:
    length = max(1, CHUNK // stretch.dtype.itemsize)
    # Cut at multiples of the length, so that all ranks with the same elements cut them alike.
    cuts = [stretch.start, *range((stretch.start // length + 1) * length, stretch.end, length), stretch.end]
    return [
        WriteItem(
            index=MetadataIndex(name, torch.Size(offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)),
                properties=TensorProperties(dtype=stretch.dtype),
                size=stretch.shape,
            ),
        )
        for begin, end in itertools.pairwise(cuts)
        for offsets, sizes in boxes(stretch.shape, begin, end)
    ]


def _path(name: str) -> tuple[str, ...]:
    """Its path where torch rebuilds nested dictionaries from the directory: names of parameters contain dots themselves."""
    if part := keys.optimizer_part(name):
        return (*keys.OPTIMIZER.rstrip(".").split("."), *part)
    head, _, rest = name.partition(".")
    return (head, rest)


class _Writer(FileSystemWriter):
    """Writes one file for each rank, and computes its checksum and the hashes of its tensors at the same time."""

    def __init__(self, folder: Path, ties: Mapping[str, str], advance: Advance, *, own_index: bool) -> None:
        super().__init__(folder, overwrite=False)
        self.ties = {keys.PARAMETERS + alias: keys.PARAMETERS + name for alias, name in ties.items()}
        self.files: dict[str, tuple[int, int]] = {}
        self.hashes: dict[str, int] = defaultdict(int)
        self.squares: dict[str, float] = defaultdict(float)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._advance = advance
        self._own_index = own_index

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # the base class would write a local path into the file

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        results: list[WriteResult] = []
        with DirectFile(Path(self.path) / name) as file:
            for item in plan.items:
                begin = file.size
                self._put(file, item, planner.resolve_data(item).detach().cpu())
                results.append(WriteResult(item.index, file.size - begin, dcp.place(name, begin, file.size - begin)))
        self.files[name] = (file.size, file.crc)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _put(self, file: DirectFile, item: WriteItem, values: Tensor) -> None:
        """Write one record. Hash and norm are computed block by block, while the block is in the CPU cache."""
        before, after = envelope_of(values)
        name, start, flat = item.index.fqn, _start(item), values.reshape(-1)
        file.write(before)
        for block in torch.split(flat, max(1, BUFFER // flat.itemsize)):
            file.write(block.view(torch.uint8).numpy().data)
            self.hashes[name] += hash_of(block, start)
            if block.is_floating_point():
                self.squares[name] += float(norm_of(block)) ** 2
            start += block.numel()
            self._advance(block.nbytes)
        file.write(after)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        entries = metadata.state_dict_metadata
        for alias, name in self.ties.items():
            entries[alias] = entries[name]
            metadata.planner_data[alias] = _path(alias)
            own = [result for rank in results for result in rank if result.index.fqn == name]
            results[0] += [dataclasses.replace(each, index=dataclasses.replace(each.index, fqn=alias)) for each in own]
        self.shapes = {name: tuple(entry.size) for name, entry in entries.items()}  # type: ignore[union-attr]
        self.dtypes = {name: name_of(entry.properties.dtype) for name, entry in entries.items()}  # type: ignore[union-attr]
        super().finish(metadata, results)
        folder = Path(self.path)
        index = (folder / FILE).read_bytes()  # read here, where torch propagates a failure on rank 0 to all ranks
        self.files[FILE] = (len(index), zlib.crc32(index))
        if self._own_index:
            table = self._index_of(metadata, results, len(index))
            (folder / shard_index.FILE).write_bytes(table)
            fsync(folder / shard_index.FILE)
            self.files[shard_index.FILE] = (len(table), zlib.crc32(table))
        fsync(folder)

    def _index_of(self, metadata: Metadata, results: list[list[WriteResult]], size: int) -> bytes:
        entries: dict[str, Any] = metadata.state_dict_metadata
        tensors = {name: (entry.properties.dtype, tuple(entry.size)) for name, entry in entries.items()}
        strides = {name: [math.prod(shape[dim + 1 :]) for dim in range(len(shape))] for name, (_, shape) in tensors.items()}
        rows: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in tensors}
        files: dict[str, int] = {}
        for rank in results:
            for result in rank:
                name, offset, place = result.index.fqn, result.index.offset or (), result.storage_data
                first = sum(at * stride for at, stride in zip(offset, strides[name], strict=True))
                rows[name].append((first, files.setdefault(place.relative_path, len(files)), place.offset, place.length))
        return shard_index.bytes_of(tensors, rows, list(files), size)
