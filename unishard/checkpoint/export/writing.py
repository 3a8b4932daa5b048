"""Writes planned files: every rank writes its shards directly to their file offsets, block by block.

Nothing is gathered.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from unishard.checkpoint import shared_folder
from unishard.checkpoint.disk import fsync
from unishard.checkpoint.export.destination import begin, clean, move_in, require_free
from unishard.checkpoint.export.plan import ExportedTensor, File
from unishard.checkpoint.export.shares import missing, share
from unishard.distributed.lazy_shards import LazyShard
from unishard.distributed.on_ranks import Ranks
from unishard.errors import CheckpointError

BLOCK = 1 << 24
"""Bytes read at once: the same size and alignment as the chunks of a checkpoint, so that each chunk is read once."""

Advance = Callable[[int], None]
"""Called with the number of further bytes written."""


def write(
    folder: Path,
    shards: Mapping[str, LazyShard],
    files: Sequence[File],
    others: Mapping[str, bytes],
    ranks: Ranks,
    advance: Advance = lambda written: None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a folder atomically. Collective.

    Args:
        folder: Empty or nonexistent, unless `overwrite` is set; on a file system that all ranks share.
        shards: This rank's shard of each tensor, by its name in the model.
        files: The planned tensor files; the same on all ranks.
        others: All other files, by name; rank 0's are written.
        ranks: The ranks that take part.
        advance: Called with this rank's progress.
        overwrite: Whether to replace an earlier export there, once the new one is complete.

    Raises:
        CheckpointError: On every rank: one of them cannot write, no rank holds some elements, or a value overflows the
            dtype. Nothing is left behind.
    """
    draft = Path(ranks.each(lambda: _begin(folder, files, overwrite) if ranks.rank == 0 else "")[0])
    try:
        shared_folder.require_shared(draft, ranks, folder, "the folder of an export")
        intervals = ranks.each(lambda: _intervals(shards, files))
        ranks.each(lambda: _refuse_gaps(shards, intervals) if ranks.rank == 0 else None)
        ranks.each(lambda: _fill(draft, folder, shards, files, intervals, ranks.rank, advance))
        ranks.each(lambda: _finish(draft, folder, files, others, overwrite) if ranks.rank == 0 else None)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        raise


def _begin(folder: Path, files: Sequence[File], overwrite: bool) -> str:
    """Create the draft folder, with every file at its full size."""
    with _os_errors(folder):
        clean(folder)
        require_free(folder, overwrite=overwrite)
        draft = begin(folder)
        try:
            for file in files:
                path = draft / file.name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as opened:
                    opened.write(file.header)
                    opened.truncate(file.size)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    return str(draft)


def _intervals(shards: Mapping[str, LazyShard], files: Sequence[File]) -> dict[str, range]:
    sources = dict.fromkeys(place.entry.source for file in files for place in file.places)
    return {source: shards[source].interval for source in sources}


def _refuse_gaps(shards: Mapping[str, LazyShard], intervals: Sequence[Mapping[str, range]]) -> None:
    for source in intervals[0]:
        gap = missing([theirs[source] for theirs in intervals], shards[source].shape.numel())
        if gap is not None:
            raise CheckpointError(
                f"no rank holds element {gap} of {source}; every rank of the engine must take part in the export"
            )


def _fill(
    draft: Path,
    folder: Path,
    shards: Mapping[str, LazyShard],
    files: Sequence[File],
    intervals: Sequence[Mapping[str, range]],
    rank: int,
    advance: Advance,
) -> None:
    for file in files:
        with _os_errors(folder / file.name):
            descriptor = os.open(draft / file.name, os.O_WRONLY)
            try:
                for entry, at in file.places:
                    own = share([theirs[entry.source] for theirs in intervals], rank)
                    _put(descriptor, at, entry, shards[entry.source], own, advance)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _put(descriptor: int, at: int, entry: ExportedTensor, tensor: LazyShard, own: range, advance: Advance) -> None:
    """Write these elements of a tensor, block by block."""
    length, size = max(1, BLOCK // tensor.dtype.itemsize), entry.dtype.itemsize
    for first_of_block in range(own.start // length * length, own.stop, length):
        block = range(max(first_of_block, own.start), min(first_of_block + length, own.stop))
        for held in tensor.within(entry.start, entry.start + math.prod(entry.shape), block):
            data: memoryview = _cast(held.read(tensor), entry).view(-1).view(torch.uint8).numpy().data
            advance(len(data))
            for first, place, count in held.runs():
                _write(descriptor, data[place * size :][: count * size], at + (first - entry.start) * size)


def _write(descriptor: int, data: memoryview, place: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, place)
        data, place = data[count:], place + count


@torch.no_grad()
def _cast(values: Tensor, entry: ExportedTensor) -> Tensor:
    """Cast to the file's dtype, always on the CPU, so that rounding is the same everywhere (to nearest, ties to
    even).
    """
    values = values.detach().cpu()
    cast = values.to(entry.dtype).contiguous()
    if (
        entry.dtype == torch.float16
        and values.dtype != torch.float16
        and not torch.equal(cast.isfinite(), values.isfinite())
    ):
        raise CheckpointError(f"{entry.source} has values beyond 65504, the fp16 maximum; export it as bf16 or fp32")
    return cast


def _finish(draft: Path, folder: Path, files: Sequence[File], others: Mapping[str, bytes], overwrite: bool) -> None:
    with _os_errors(folder):
        shared_folder.unmark(draft)
        for name, data in others.items():
            path = draft / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            fsync(path)
        for inside in {(draft / name).parent for name in [*others, *(file.name for file in files)]} | {draft}:
            fsync(inside)
        move_in(draft, folder, overwrite=overwrite)


@contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into one CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written ({error.strerror or error}); free disk space, or choose a folder that every "
            "rank can write to; nothing is left behind"
        ) from None
