"""Writes a complete checkpoint from the ranks' shards, atomically."""

from __future__ import annotations

import gc
import logging
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.checkpoint import directory, finding, manifest, ownership
from unishard.checkpoint.files import fsync
from unishard.checkpoint.hashing import hexadecimal
from unishard.checkpoint.manifest import FileFacts, Manifest, TensorFacts
from unishard.checkpoint.plan_cache import PlanCache
from unishard.checkpoint.planning import Written
from unishard.checkpoint.writing import write
from unishard.distributed import process_group
from unishard.distributed.on_ranks import is_shared, on_first, ranks_of
from unishard.distributed.shards import LazyShard
from unishard.errors import CheckpointError
from unishard.failures.endings import naming_causes

# -- The manifest's fields about the files and tensors that were written ---------------------------


def summary_of(written: Written, buffers: Collection[str]) -> dict[str, Any]:
    """The fields of a manifest that are known only after writing.

    Args:
        written: By all ranks.
        buffers: Names of the model's tensors that are not parameters.
    """
    return {
        "written": datetime.now(UTC).isoformat(timespec="microseconds"),
        "norms": _norms(written, buffers),
        "files": {
            name: FileFacts(bytes=size, crc32=f"{crc:08x}") for name, (size, crc) in sorted(written.files.items())
        },
        "tensors": {
            name: TensorFacts(shape=list(shape), dtype=written.dtypes[name], hash=hexadecimal(written.hashes[name]))
            for name, shape in sorted(written.shapes.items())
        },
    }


def _norms(written: Written, buffers: Collection[str]) -> dict[str, float]:
    """L2 norm of all parameters, and of each kind of optimizer state with a parameter's shape."""
    squares: dict[str, float] = {}
    for name, square in written.squares.items():
        parameter, part = manifest.parameter_of(name), manifest.optimizer_part(name)
        if part is not None and written.shapes[name] == written.shapes.get(manifest.PARAMETERS + part[0]):
            squares[part[1]] = squares.get(part[1], 0.0) + square
        elif parameter is not None and parameter not in buffers:
            squares["parameters"] = squares.get("parameters", 0.0) + square
    return {kind: math.sqrt(square) for kind, square in squares.items()}


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
) -> Path:
    """Write a snapshot as a checkpoint. Collective.

    Args:
        root: The folder of the run's checkpoints.
        snapshot: Its tensors are read during the call, so nothing may modify them.
        retention: Applied once the new checkpoint is complete.
        group: A process group with a CPU backend.
        advance: Called with this rank's progress in bytes.
        cache: What this rank remembers of the last save, so that the same tensors are not planned again.

    Returns:
        The checkpoint directory.

    Raises:
        CheckpointError: On every rank: it could not be written, or the ranks do not share the folder. Earlier
            checkpoints are unchanged. A rank on which a KeyboardInterrupt or SystemExit was raised raises that.
    """
    beside = snapshot.run or "" if snapshot.other_run_present else ""
    temporary = on_first(group, lambda: directory.begin(root, snapshot.step, beside))
    try:
        ownership.require_shared(temporary, ranks_of(group), root, "checkpoint.dir")
        written = write(temporary, snapshot.shards, ties=snapshot.ties, group=group, advance=advance, cache=cache)

        def finish() -> Path:
            assert written is not None
            ownership.unmark(temporary)
            ownership.require_complete(temporary, written.files)
            files = _write_assets(temporary, snapshot.assets)
            directory.write_manifest(temporary, _manifest(snapshot, written, files, finding.next_commit(root)))
            ownership.confirm(root)  # a save may take long
            complete = directory.commit(temporary, root, snapshot.step, beside)
            last, every, keep_best, best = retention
            directory.prune(root, last, every, complete, keep_best=keep_best, best=best)
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


def _manifest(snapshot: Snapshot, written: Written, assets: Mapping[str, tuple[int, int]], commit: int) -> Manifest:
    facts = summary_of(written._replace(files={**written.files, **assets}), snapshot.facts["buffers"])
    _logger.info(
        "saved step %d: %s",
        snapshot.step,
        ", ".join(f"norm of {kind} {norm:.9g}" for kind, norm in facts["norms"].items()),
    )
    return Manifest(
        **snapshot.facts, **facts, step=snapshot.step, run=snapshot.run, commit=commit, ties=dict(snapshot.ties)
    )


# -- Writes a checkpoint in a background thread, one at a time, from a copy in host memory ---------


class Background:
    """At most one job in a background thread; the next call on this object raises its failure.

    Args:
        ready: Create the process group now, which is collective. If it is created at the first start and a rank is gone
            by then, the other ranks wait for torch's timeout (half an hour, torch 2.13).
    """

    def __init__(self, *, ready: bool = False) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[Any] | None = None
        self._copies: dict[str, Tensor] = {}
        self._group = _borrowed() if ready else None

    def start(self, work: Callable[[dist.ProcessGroup], Any]) -> None:
        """Start a job, after the previous one has finished. Collective the first time, unless created with `ready`.

        Args:
            work: Is passed a process group that nothing else uses: neither the main thread nor another engine's save.
        """
        self.wait()
        self._pool = self._pool or ThreadPoolExecutor(1, "unishard-checkpoint")
        self._group = self._group or _borrowed()
        self._running = self._pool.submit(_logged, work, self._group[0])

    @torch.no_grad()
    def stage(self, snapshot: Snapshot) -> Snapshot:
        """A copy of a snapshot in host memory, so that training can continue. Waits for the previous job.

        The memory is kept for the next save: allocating and pinning it costs more than the copy.
        """
        self.wait()
        before, self._copies = self._copies, {}
        for name, stretch in snapshot.shards.items():
            values = stretch.read(stretch.start, stretch.end)
            copy = before.get(name)
            if copy is None or (copy.shape, copy.dtype) != (values.shape, values.dtype):
                copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            self._copies[name] = copy.copy_(values, non_blocking=values.is_cuda)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        held = {
            name: stretch._replace(read=partial(_read, self._copies[name], stretch.start))
            for name, stretch in snapshot.shards.items()
        }
        return snapshot._replace(shards=held)

    @property
    def is_running(self) -> bool:
        """Whether a job was started for which nobody has waited."""
        return self._running is not None

    def wait(self) -> None:
        """Wait until the running job is done.

        Raises:
            CheckpointError: The job failed.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait, and release the thread and the memory."""
        try:
            self.wait()
        finally:
            self._copies.clear()
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None
            if self._group is not None:
                process_group.give_back(*self._group)
                self._group = None


def _borrowed() -> tuple[dist.ProcessGroup, Any]:
    return process_group.borrow_group(), dist.group.WORLD


def _logged(work: Callable[[dist.ProcessGroup], Any], group: dist.ProcessGroup) -> Any:
    """Run the job; log a failure at once, because a script that ends without `close` never sees it."""
    try:
        with naming_causes():
            return work(group)
    except Exception as error:
        if dist.get_rank(group) == 0:
            _logger.error("the save in the background failed: %s", error)
        raise


def _read(copy: Tensor, start: int, begin: int, end: int) -> Tensor:
    return copy[begin - start : end - start]
