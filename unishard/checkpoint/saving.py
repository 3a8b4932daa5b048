"""From what the ranks hold to a complete checkpoint: all of it, or nothing."""

from __future__ import annotations

import gc
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from unishard.checkpoint import directory
from unishard.checkpoint.disk import fsync
from unishard.checkpoint.lazy_shards import LazyShard
from unishard.checkpoint.manifest import Manifest
from unishard.checkpoint.summary import summary_of
from unishard.checkpoint.writing import Written, write
from unishard.distributed.on_ranks import on_first
from unishard.errors import CheckpointError

__all__ = ["Retention", "Snapshot", "save", "without_collections"]

_logger = logging.getLogger("unishard")


class Snapshot(NamedTuple):
    """What one rank knows of a moment of the training."""

    step: int
    """Accumulation windows that have ended; the name of the checkpoint."""
    stretches: Mapping[str, LazyShard]
    """What this rank holds of each tensor."""
    ties: Mapping[str, str]
    """Other names of parameters, to those under which they are stored."""
    facts: Mapping[str, Any]
    """The fields of the manifest, but for those that come of writing. Rank 0's count."""
    assets: Mapping[str, bytes]
    """Small files that go along, by their path in the checkpoint. Rank 0's count."""


class Retention(NamedTuple):
    """Which checkpoints stay."""

    keep_last: int | None = None
    """That many of the newest; None for all."""
    keep_every: int | None = None
    """And those whose step is a multiple of it."""


def save(
    root: Path,
    snapshot: Snapshot,
    retention: Retention,
    group: dist.ProcessGroup | None,
    advance: Callable[[int], None] = lambda written: None,
) -> Path:
    """Write a checkpoint of one moment into a directory of checkpoints. Collective.

    Args:
        root: Holds the checkpoints of a run.
        snapshot: Its stretches are read while this runs, so nothing may write into them.
        retention: Applied when the new checkpoint is complete.
        group: Of a backend for the CPU.
        advance: Told of this rank's progress, in bytes.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: On every rank: it could not be written. What was there before is still there.
    """
    temporary = on_first(group, lambda: directory.begin(root, snapshot.step))
    try:
        written = write(temporary, snapshot.stretches, ties=snapshot.ties, group=group, advance=advance)

        def finish() -> Path:
            assert written is not None
            files = _write_assets(temporary, snapshot.assets)
            directory.write_manifest(temporary, _manifest(snapshot, written, files))
            complete = directory.commit(temporary, root, snapshot.step)
            directory.prune(root, retention.keep_last, retention.keep_every, complete)
            return complete

        return on_first(group, finish)
    except CheckpointError:  # on every rank, so that they can clear up together
        _clear_up(root, group)
        raise


@contextmanager
def without_collections() -> Iterator[None]:
    """Python's garbage collector off: for the many small objects of a plan it would look through all those of the process."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _clear_up(root: Path, group: dist.ProcessGroup | None) -> None:
    """After a failure, whose cause is raised and not what may go wrong here. It may have come before the new name was given, or after."""
    try:
        on_first(group, lambda: directory.clean(root))
    except CheckpointError as error:
        _logger.warning("%s; the next run that saves here tries again", error)


def _write_assets(folder: Path, assets: Mapping[str, bytes]) -> dict[str, tuple[int, int]]:
    for name, data in assets.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        fsync(path)
    for path in {(folder / name).parent for name in assets}:
        fsync(path)
    return {name: (len(data), zlib.crc32(data)) for name, data in assets.items()}


def _manifest(snapshot: Snapshot, written: Written, assets: Mapping[str, tuple[int, int]]) -> Manifest:
    facts = summary_of(written._replace(files={**written.files, **assets}), snapshot.facts["buffers"])
    _logger.info("saved step %d: %s", snapshot.step, ", ".join(f"norm of {kind} {norm:.9g}" for kind, norm in facts["norms"].items()))
    return Manifest(**snapshot.facts, **facts, step=snapshot.step, ties=dict(snapshot.ties))
