"""Writes sharded tensors as one torch.distributed.checkpoint directory, with checksums of its files and hashes of its
tensors.

Every rank writes its own shards without copying them; ranks that hold the same shard divide it between them. Nothing is
gathered.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

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

from unishard.checkpoint import tensor_names
from unishard.checkpoint.direct_file import BUFFER, DirectFile
from unishard.checkpoint.hashing import MASK, hash_of_shard
from unishard.checkpoint.holdings import TensorIntervals, cut, divided, intervals_of, packed
from unishard.checkpoint.plan_cache import PlanCache
from unishard.checkpoint.planning import RankResult, SaveResult
from unishard.checkpoint.records import envelope_of
from unishard.distributed.interrupts import share
from unishard.distributed.lazy_shards import LazyShard
from unishard.distributed.shards import norm_of
from unishard.errors import CheckpointError

CHUNK = 1 << 24
"""Bytes of a chunk. A reader always reads entire chunks."""

Advance = Callable[[int], None]
"""Called with the number of further bytes written."""


def write(
    folder: Path,
    shards: Mapping[str, LazyShard],
    *,
    ties: Mapping[str, str] | None = None,
    group: dist.ProcessGroup | None = None,
    advance: Advance = lambda written: None,
    cache: PlanCache | None = None,
    single_process: bool = False,
) -> SaveResult | None:
    """Write a directory. Collective if torch.distributed is initialized, unless `single_process` is set.

    Args:
        folder: Empty or nonexistent; the same on all ranks.
        shards: This rank's shard of each tensor, by the tensor's name in the checkpoint. Several ranks may hold the
            same shard.
        ties: Other names of tied tensors, to the names under which they are stored; readers find both.
        group: A process group with a CPU backend; None for the default group.
        advance: Called with this rank's progress.
        cache: What this rank remembers of the last save; is updated. None to plan anew.
        single_process: Whether this process writes all of it, whatever ranks there are.

    Returns:
        What was written, on rank 0; None on the others.

    Raises:
        CheckpointError: On every rank: one of them could not write its file, or the shards do not cover the tensors.
    """
    single = single_process or not dist.is_initialized()
    planner = _Planner(shards, cache or PlanCache())
    if single or dist.get_rank(group) == 0:
        planner.cache.choose(planner.cuts * (1 if single else dist.get_world_size(group)))
    planner.reuses = cache is not None and cache.fits(planner.key, group)
    writer = _Writer(folder, ties or {}, advance, planner)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "torch.distributed is disabled", UserWarning
            )  # because of `no_dist`, as intended
            save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=single)
    except (CheckpointException, OSError, ValueError) as error:
        planner.cache.forget()
        _raise_own_interrupt(error, 0 if single else dist.get_rank(group))
        message, known = _cause(error)
        raise CheckpointError(f"{folder}: {message}") from None if known else error
    except BaseException:
        planner.cache.forget()
        raise
    planner.remember()
    return writer.result


def _raise_own_interrupt(error: BaseException, rank: int) -> None:
    """Raise this rank's KeyboardInterrupt or SystemExit, which torch reports as a failure to write (torch 2.13,
    checkpoint/utils.py).
    """
    cause, _ = error.failures.get(rank, (None, None)) if isinstance(error, CheckpointException) else (None, None)
    if cause is not None and not isinstance(cause, Exception):
        raise share(cause) from None


def _cause(error: BaseException) -> tuple[str, bool]:
    """The error message of the first rank that failed, from what torch.distributed.checkpoint raises on all ranks, and
    whether it says all, as that of a full disk does.
    """
    if not isinstance(error, CheckpointException):
        return str(error), isinstance(error, OSError)
    rank, (cause, _) = next(iter(sorted(error.failures.items())))
    # a KeyboardInterrupt has no message
    return f"rank {rank} could not write its shards: {str(cause) or type(cause).__name__}", isinstance(cause, OSError)


class _Planner(DefaultSavePlanner):
    """Plans whole intervals instead of their chunks, and only if they differ from those of the save before."""

    def __init__(self, shards: Mapping[str, LazyShard], cache: PlanCache) -> None:
        super().__init__()
        self.shards = shards
        self.intervals = [intervals_of(part) for part in divided(shards)]
        self._packed = [packed(intervals) for intervals in self.intervals]
        self.key = (CHUNK, self._packed[0])
        self.reuses = False
        self.cache = cache
        self.masks: list[bytes] = []
        self.lengths: list[Any] = []
        """Of this rank's records of each part."""

    @property
    def cuts(self) -> int:
        """How many chunks this rank holds."""
        return sum(len(cut(intervals, CHUNK).tensor) for intervals in self.intervals)

    def create_local_plan(self) -> SavePlan:
        lasting, changing = self._packed
        return SavePlan([], planner_data=(None if self.reuses else lasting, changing))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        masks = self.cache.planning.plan(CHUNK, [plan.planner_data for plan in all_plans])
        return [
            dataclasses.replace(plan, planner_data=mask) for plan, mask in zip(all_plans, masks, strict=True)
        ], Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        lasting, changing = new_plan.planner_data
        self.masks = [self.cache.mask if lasting is None else lasting, changing]
        return new_plan

    def remember(self) -> None:
        """Keep the plan for the next save."""
        if not self.reuses:
            self.cache.remember(self.key, self.masks[0], self.lengths[0])


class _Writer(FileSystemWriter):
    """Writes one file for each rank, and computes its checksum and the hashes of its tensors at the same time."""

    def __init__(self, folder: Path, ties: Mapping[str, str], advance: Advance, planner: _Planner) -> None:
        super().__init__(folder, overwrite=False)
        self.result: SaveResult | None = None
        """On rank 0, once all is written."""
        self._ties = {tensor_names.PARAMETERS + alias: tensor_names.PARAMETERS + name for alias, name in ties.items()}
        self._planner = planner
        self._advance = advance

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # the base class would write a local path into the file

    def write_data(self, plan: SavePlan, planner: Any) -> Future[Any]:
        name = f"{plan.storage_data.prefix}0.distcp"
        with DirectFile(Path(self.path) / name) as file:
            parts = [
                self._put_part(file, intervals, mask)
                for intervals, mask in zip(planner.intervals, planner.masks, strict=True)
            ]
        planner.lengths = lengths = [part[0] for part in parts]
        if planner.reuses and np.array_equal(lengths[0], planner.cache.lengths):
            lengths = [None, lengths[1]]
        future: Future[Any] = Future()
        future.set_result(
            [RankResult(name, file.size, file.crc, lengths, [part[1] for part in parts], [part[2] for part in parts])]
        )
        return future

    def _put_part(self, file: DirectFile, intervals: TensorIntervals, mask: bytes) -> tuple[Any, Any, Any]:
        """Write the cuts in the mask. Returns the lengths of the records, and the hash and the sum of squares of each
        tensor.
        """
        cuts, lengths = cut(intervals, CHUNK), []
        hashes, squares = [0] * len(intervals.tensors), [0.0] * len(intervals.tensors)
        mine = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(cuts.tensor)).astype(bool)
        for number, begin, end in zip(*(column[mine].tolist() for column in cuts), strict=True):
            shard = self._planner.shards[intervals.tensors[number].name]
            for box in shard.order.boxes(shard.shape, begin, end):
                values, before = shard.read(box.first, box.last).view(box.sizes).detach().cpu(), file.size
                for block, start in self._put(file, values, box.first):
                    own = hash_of_shard(block, start, shard.shape, shard.order)
                    hashes[number] = (hashes[number] + own) & MASK
                    if block.is_floating_point():
                        squares[number] += float(norm_of(block)) ** 2
                lengths.append(file.size - before)
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
        planning = self._planner.cache.planning
        self.result = planning.finish(Path(self.path), self._ties, [result for (result,) in results])
