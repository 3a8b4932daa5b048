"""Writes a complete checkpoint from the ranks' shards, atomically."""

from __future__ import annotations

import gc
import logging
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from unishard.checkpoint import directory, finding, ownership, shared_folder
from unishard.checkpoint.disk import fsync
from unishard.checkpoint.manifest import Manifest
from unishard.checkpoint.plan_cache import PlanCache
from unishard.checkpoint.planning import SaveResult
from unishard.checkpoint.summary import summary_of
from unishard.checkpoint.writing import write
from unishard.distributed.interrupts import is_shared
from unishard.distributed.lazy_shards import LazyShard
from unishard.distributed.on_ranks import on_first, ranks_of
from unishard.errors import CheckpointError

_logger = logging.getLogger("unishard")


class Snapshot(NamedTuple):
    """The training state of one rank at one step."""

    step: int
    """Completed accumulation windows; names the checkpoint."""
    shards: Mapping[str, LazyShard]
    """This rank's shard of each tensor."""
    ties: Mapping[str, str]
    """Other names of tied parameters, to the name under which each is stored."""
    facts: Mapping[str, Any]
    """The fields of the manifest that are known before writing. Only rank 0's are used."""
    assets: Mapping[str, bytes]
    """Small files to include, by their path in the checkpoint. Only rank 0's are used."""
    run: str | None = None
    """The run, which the manifest names. Only rank 0's is used."""
    other_run_present: bool = False
    """Whether the run began beside checkpoints of another one, so that the name of the checkpoint must name it. Only
    rank 0's is used."""
    after: int = 0
    """The highest number of a commit elsewhere that this one comes after. Only rank 0's is used."""


class Retention(NamedTuple):
    """Which checkpoints of a run are kept."""

    keep_last: int | None = None
    """Number of the newest checkpoints to keep; None for all."""
    keep_every: int | None = None
    """Also keep those whose step is a multiple of it."""
    keep_best: int | None = None
    """Also keep so many of those with the best metric."""
    best: str = "min"
    """Whether the lowest (`min`) or the highest (`max`) metric is the best."""


def save(
    root: Path,
    snapshot: Snapshot,
    retention: Retention,
    group: dist.ProcessGroup | None,
    advance: Callable[[int], None] = lambda written: None,
    cache: PlanCache | None = None,
    held: Callable[[], Collection[Path]] = tuple,
) -> Path:
    """Write a snapshot as a checkpoint. Collective.

    Args:
        root: The folder of the run's checkpoints.
        snapshot: Its tensors are read during the call, so nothing may modify them.
        retention: Applied once the new checkpoint is complete.
        group: A process group with a CPU backend.
        advance: Called with this rank's progress in bytes.
        cache: What this rank remembers of the last save, so that the same tensors are not planned again.
        held: Returns the checkpoints that are not deleted now. Only rank 0's is called.

    Returns:
        The checkpoint directory.

    Raises:
        CheckpointError: On every rank: it could not be written, or the ranks do not share the folder. Earlier
            checkpoints are unchanged. A rank on which a KeyboardInterrupt or SystemExit was raised raises that.
    """
    beside = snapshot.run or "" if snapshot.other_run_present else ""
    temporary = on_first(group, lambda: directory.begin(root, snapshot.step, beside))
    try:
        shared_folder.require_shared(temporary, ranks_of(group), root, "checkpoint.dir")
        result = write(temporary, snapshot.shards, ties=snapshot.ties, group=group, advance=advance, cache=cache)

        def finish() -> Path:
            assert result is not None
            shared_folder.unmark(temporary)
            shared_folder.require_complete(temporary, result.files)
            files = _write_assets(temporary, snapshot.assets)
            commit = max(finding.next_commit(root), snapshot.after + 1)
            directory.write_manifest(temporary, _manifest(snapshot, result, files, commit))
            ownership.confirm(root)  # a save may take long
            complete = directory.commit(temporary, root, snapshot.step, beside)
            last, every, keep_best, best = retention
            directory.prune(root, last, every, complete, keep_best=keep_best, best=best, held=held())
            return complete

        return on_first(group, finish)
    except BaseException as error:
        if isinstance(error, CheckpointError) or is_shared(
            error
        ):  # raised on every rank, so that all can take part in the cleanup
            _clean_up(root, group)
        raise


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable Python's garbage collector: the many small objects of a save plan would trigger scans of the entire
    heap.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _clean_up(root: Path, group: dist.ProcessGroup | None) -> None:
    """Clean up after a failure, before or after the rename.

    Errors here are only logged, so that the original one is raised.
    """
    try:
        on_first(group, lambda: directory.clean(root, owns=not ownership.is_lost(root)))
    except CheckpointError as error:
        _logger.warning("%s; the next run that saves here retries the cleanup", error)


def _write_assets(folder: Path, assets: Mapping[str, bytes]) -> dict[str, tuple[int, int]]:
    for name, data in assets.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        fsync(path)
    for path in {(folder / name).parent for name in assets}:
        fsync(path)
    return {name: (len(data), zlib.crc32(data)) for name, data in assets.items()}


def _manifest(snapshot: Snapshot, result: SaveResult, assets: Mapping[str, tuple[int, int]], commit: int) -> Manifest:
    facts = summary_of(result._replace(files={**result.files, **assets}), snapshot.facts["buffers"])
    _logger.info(
        "saved step %d: %s",
        snapshot.step,
        ", ".join(f"norm of {kind} {norm:.9g}" for kind, norm in facts["norms"].items()),
    )
    return Manifest(
        **snapshot.facts, **facts, step=snapshot.step, run=snapshot.run, commit=commit, ties=dict(snapshot.ties)
    )
