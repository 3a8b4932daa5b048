"""Writes sharded tensors as one torch.distributed.checkpoint directory, with checksums of its files and hashes of its tensors.

Every rank writes its own shards without copying them; ranks that hold the same shard divide it between them. Nothing is gathered.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from unishard.checkpoint import index_file, keys, shard_index
from unishard.checkpoint.assignment import Assignment, Places
from unishard.checkpoint.direct_file import BUFFER, DirectFile
from unishard.checkpoint.disk import fsync
from unishard.checkpoint.hashing import MASK, hash_of
from unishard.checkpoint.held import Held, cut, divided, held_of, packed
from unishard.checkpoint.intervals import boxes
from unishard.checkpoint.lazy_shards import LazyShard
from unishard.checkpoint.metadata import FILE
from unishard.checkpoint.plan_cache import PlanCache
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
    cache: PlanCache | None = None,
) -> Written | None:
    """Write a directory. Collective if torch.distributed is initialized.

    Args:
        folder: Empty or nonexistent; the same on all ranks.
        stretches: This rank's shard of each tensor, by the tensor's name in the checkpoint. Several ranks may hold the same shard.
        ties: Other names of tied tensors, to the names under which they are stored; readers find both.
        group: A process group with a CPU backend; None for the default group.
        advance: Called with this rank's progress.
        own_index: Whether to write our own index beside torch's, from which ranks read only what they need.
        cache: What this rank remembers of the last save; is updated. None to plan anew.

    Returns:
        What was written, on rank 0; None on the others.

    Raises:
        CheckpointError: On every rank: one of them could not write its file, or the shards do not cover the tensors.
    """
    single = not dist.is_initialized()
    planner = _Planner(stretches, cache or PlanCache())
    planner.reuses = cache is not None and cache.fits(planner.key, group)
    writer = _Writer(folder, ties or {}, advance, planner, own_index=own_index)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # because of `no_dist`, as intended
            save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=single)
    except (CheckpointException, OSError, ValueError) as error:
        planner.cache.forget()
        _raise_own_interrupt(error, 0 if single else dist.get_rank(group))
        raise CheckpointError(f"{folder}: {_cause(error)}") from error
    except BaseException:
        planner.cache.forget()
        raise
    planner.remember()
    return writer.written


def _raise_own_interrupt(error: BaseException, rank: int) -> None:
    """Raise this rank's KeyboardInterrupt or SystemExit, which torch reports as a failure to write (torch 2.13, checkpoint/utils.py)."""
    own, _ = error.failures.get(rank, (None, None)) if isinstance(error, CheckpointException) else (None, None)
    if own is not None and not isinstance(own, Exception):
        raise share(own) from None


def _cause(error: BaseException) -> str:
    """The error message of the first rank that failed, from what torch.distributed.checkpoint raises on all ranks."""
    if not isinstance(error, CheckpointException):
        return str(error)
    rank, (cause, _) = next(iter(sorted(error.failures.items())))
    return f"rank {rank} could not write its shards: {str(cause) or type(cause).__name__}"  # a KeyboardInterrupt has no message


class _Result(NamedTuple):
    """What a rank has written, in two parts: what is alike in each save, and the rest."""

    file: str
    size: int
    crc: int
    lengths: list[Any]
    """Of the records of each part; None if they are those of the save before."""
    hashes: list[Any]
    """What this rank adds to the hash of each tensor that it holds."""
    squares: list[Any]


class _Planner(DefaultSavePlanner):
    """Plans the intervals that ranks hold, and not each chunk of them, unless the save before has planned the same."""

    def __init__(self, stretches: Mapping[str, LazyShard], cache: PlanCache) -> None:
        super().__init__()
        self.stretches = stretches
        self.held = [held_of(part) for part in divided(stretches)]
        self._packed = [packed(each) for each in self.held]
        self.key = (CHUNK, self._packed[0])
        self.reuses = False
        self.cache = cache
        self.masks: list[bytes] = []
        self.lengths: list[Any] = []
        self.assignments: list[Assignment] = []
        """On rank 0: of each part."""
        self.everyones: list[list[Any]] = []

    def create_local_plan(self) -> SavePlan:
        lasting, changing = self._packed
        return SavePlan([], planner_data=(None if self.reuses else lasting, changing))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        lasting, changing = zip(*(plan.planner_data for plan in all_plans), strict=True)
        known = self.cache.assignment if self.reuses else None
        self.assignments = [known or Assignment(lasting, CHUNK), Assignment(changing, CHUNK)]
        masks = [[None] * len(all_plans) if known else self.assignments[0].masks, self.assignments[1].masks]
        plans = [dataclasses.replace(plan, planner_data=own) for plan, own in zip(all_plans, zip(*masks, strict=True), strict=True)]
        return plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        lasting, changing = new_plan.planner_data
        self.masks = [self.cache.mask if lasting is None else lasting, changing]
        return new_plan

    def remember(self) -> None:
        """Keep the plan for the next save."""
        if not self.reuses:
            first = self.assignments[0] if self.assignments else None
            self.cache.remember(self.key, self.masks[0], self.lengths[0], first, self.everyones[0] if self.everyones else [])


def _path(name: str) -> tuple[str, ...]:
    """Its path where torch rebuilds nested dictionaries from the directory: names of parameters contain dots themselves."""
    if part := keys.optimizer_part(name):
        return (*keys.OPTIMIZER.rstrip(".").split("."), *part)
    head, _, rest = name.partition(".")
    return (head, rest)


class _Writer(FileSystemWriter):
    """Writes one file for each rank, and computes its checksum and the hashes of its tensors at the same time."""

    def __init__(self, folder: Path, ties: Mapping[str, str], advance: Advance, planner: _Planner, *, own_index: bool) -> None:
        super().__init__(folder, overwrite=False)
        self.written: Written | None = None
        """On rank 0, once all is written."""
        self._ties = {keys.PARAMETERS + alias: keys.PARAMETERS + name for alias, name in ties.items()}
        self._planner = planner
        self._advance = advance
        self._own_index = own_index

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # the base class would write a local path into the file

    def write_data(self, plan: SavePlan, planner: Any) -> Future[Any]:
        name = f"{plan.storage_data.prefix}0.distcp"
        with DirectFile(Path(self.path) / name) as file:
            parts = [self._put_part(file, held, mask) for held, mask in zip(planner.held, planner.masks, strict=True)]
        planner.lengths = lengths = [part[0] for part in parts]
        if planner.reuses and np.array_equal(lengths[0], planner.cache.lengths):
            lengths = [None, lengths[1]]
        future: Future[Any] = Future()
        future.set_result([_Result(name, file.size, file.crc, lengths, [part[1] for part in parts], [part[2] for part in parts])])
        return future

    def _put_part(self, file: DirectFile, held: Held, mask: bytes) -> tuple[Any, Any, Any]:
        """Write what this rank is to write of some tensors: the lengths of its records, and hash and squares of each tensor."""
        cuts, lengths = cut(held, CHUNK), []
        hashes, squares = [0] * len(held.tensors), [0.0] * len(held.tensors)
        mine = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(cuts.tensor)).astype(bool)
        for number, begin, end in zip(*(column[mine].tolist() for column in cuts), strict=True):
            stretch = self._planner.stretches[held.tensors[number].name]
            for _, sizes in boxes(stretch.shape, begin, end):
                values, before = stretch.read(begin, begin + math.prod(sizes)).view(sizes).detach().cpu(), file.size
                for block, start in self._put(file, values, begin):
                    hashes[number] = (hashes[number] + hash_of(block, start)) & MASK
                    if block.is_floating_point():
                        squares[number] += float(norm_of(block)) ** 2
                lengths.append(file.size - before)
                begin += values.numel()
        return np.array(lengths, np.int64), np.array(hashes, np.uint64), np.array(squares, np.float64)

    def _put(self, file: DirectFile, values: Tensor, start: int) -> Iterator[tuple[Tensor, int]]:
        """Write one record. Hash and norm are computed block by block, while the block is in the CPU cache."""
        before, after = envelope_of(values)
        file.write(before)
        for block in torch.split(values.reshape(-1), max(1, BUFFER // values.itemsize)):
            file.write(block.view(torch.uint8).numpy().data)
            yield block, start
            start += block.numel()
            self._advance(block.nbytes)
        file.write(after)

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        ranks: list[_Result] = [own for (own,) in results]
        lasting, changing = ([each.lengths[part] for each in ranks] for part in (0, 1))
        known = self._planner.cache.everyones
        lasting = [known[rank] if own is None else own for rank, own in enumerate(lasting)]
        self._planner.everyones = [lasting, changing]
        first, second = self._planner.assignments
        tables = [first.places(lasting, [0] * len(ranks)), second.places(changing, [int(own.sum()) for own in lasting])]
        entries = [(tensor.name, number, places) for places in tables for number, tensor in enumerate(places.tensors)]
        stored = {name: (number, places) for name, number, places in entries}
        entries += [(alias, *stored[name]) for alias, name in self._ties.items()]
        files = {each.file: (each.size, each.crc) for each in ranks}
        files |= self._put_indexes(entries, [*files])
        hashes, squares = _sums(self._planner.assignments, ranks)
        hashes |= {alias: hashes[name] for alias, name in self._ties.items()}
        kinds = {name: places.tensors[number] for name, number, places in entries}
        shapes, dtypes = ({name: each.shape for name, each in kinds.items()}, {name: name_of(each.dtype) for name, each in kinds.items()})
        self.written = Written(files, hashes, squares, shapes, dtypes)

    def _put_indexes(self, entries: list[tuple[str, int, Places]], files: list[str]) -> dict[str, tuple[int, int]]:
        """Write torch's index and our own: size and CRC-32 of each."""
        folder, paths = Path(self.path), {name: _path(name) for name, *_ in entries}
        with DirectFile(folder / f"{FILE}.tmp") as file:
            for piece in index_file.pieces(entries, files, paths):
                file.write(piece)
        (folder / f"{FILE}.tmp").rename(folder / FILE)
        put = {FILE: (file.size, file.crc)}
        if self._own_index:
            tensors = {name: (places.tensors[number].dtype, places.tensors[number].shape) for name, number, places in entries}
            rows = {name: np.column_stack([first, *rest]) for name, number, places in entries for first, _, *rest in [places.of(number)]}
            table = shard_index.bytes_of(tensors, rows, files, file.size)
            (folder / shard_index.FILE).write_bytes(table)
            fsync(folder / shard_index.FILE)
            put[shard_index.FILE] = (len(table), zlib.crc32(table))
        fsync(folder)
        return put


def _sums(assignments: list[Assignment], ranks: list[_Result]) -> tuple[dict[str, int], dict[str, float]]:
    """The hash of each tensor, and the sum of squares of each of floating-point numbers, from those of the ranks' shards."""
    hashes: dict[str, int] = {}
    squares: dict[str, float] = {}
    for part, assignment in enumerate(assignments):
        tensors = assignment.tensors
        both = assignment.added([each.hashes[part] for each in ranks]), assignment.added([each.squares[part] for each in ranks])
        hashes |= {each.name: value for each, value in zip(tensors, both[0], strict=True)}
        squares |= {each.name: value for each, value in zip(tensors, both[1], strict=True) if each.dtype.is_floating_point}
    return hashes, squares
