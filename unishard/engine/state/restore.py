"""Restore a checkpoint into a running engine: check all of its parts, then read them, then go on from them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from unishard.checkpoint import manifest as manifests  # a `manifest` is what was read
from unishard.checkpoint import metadata
from unishard.checkpoint.manifest import Manifest
from unishard.checkpoint.verifying import damaged
from unishard.contract.results import Resumed
from unishard.distributed.on_ranks import on_all
from unishard.engine.state.part import CheckpointSource, source_of
from unishard.engine.state.parts.of_run import parts_of
from unishard.engine.state.run import Run
from unishard.errors import CheckpointError

_logger = logging.getLogger("unishard")


def restore(
    run: Run, folder: Path, group: dist.ProcessGroup, *, strict: bool, verify: str | None, data: bool
) -> Resumed:
    """Restore a run from a checkpoint. Collective; the arguments are those of `Engine.load`.

    Args:
        run: The run to restore.
        folder: The checkpoint.
        group: All ranks, on the host.
        strict: Whether everything must match.
        verify: What to check.
        data: Whether the next training loader continues at the checkpoint's data position.

    Raises:
        CheckpointError: On every rank.
    """
    parts = parts_of(run)

    def opened() -> CheckpointSource:
        manifest = manifests.read(folder)
        _verify_files(folder, manifest, all_of_them=verify is not None)
        return source_of(folder, manifest, strict=strict, data=data)

    source = on_all(group, opened)

    def check() -> None:
        for part in parts.all:
            part.check(source)

    def read() -> None:
        for part in parts.all:
            part.read(source)

    on_all(group, check)
    run.adapter.reshard_all()
    run.order.place.wrote()
    try:
        on_all(group, read)
    except CheckpointError as error:  # content that was not checked before
        raise CheckpointError(
            f"{error}; some weights are loaded already: load another checkpoint before you train on"
        ) from error
    run.adapter.weights_written()
    run.order.place.resume(source.manifest.step)
    if verify == "bits":
        on_all(group, lambda: parts.tensors.compare_bits(source))
    notes = [note for part in parts.all for note in part.resume(source, group)]
    _log(source, parts.tensors.norms(source), notes)
    return Resumed(folder, source.manifest.step, parts.data.epoch, parts.user.value, tuple(notes))


def _log(source: CheckpointSource, norms: dict[str, float], notes: Sequence[str]) -> None:
    if dist.get_rank():
        return
    saved = source.manifest.norms
    described = [f"norm of {kind} {norm:.9g}, saved {saved.get(kind, math.nan):.9g}" for kind, norm in norms.items()]
    _logger.info("%s: resumed at step %d: %s", source.folder, source.manifest.step, "; ".join(described))
    for note in notes:
        _logger.warning("%s: %s", source.folder, note)


def _verify_files(folder: Path, manifest: Manifest, *, all_of_them: bool) -> None:
    """Check this rank's share of the files, or only the index."""
    names: Sequence[str] = sorted(manifest.files) if all_of_them else [metadata.FILE]
    problems = damaged(folder, manifest, names[dist.get_rank() :: dist.get_world_size()])
    if problems:
        raise CheckpointError(
            f"{folder}: {'; '.join(problems)}; load another checkpoint (unishard checkpoint list {folder.parent})"
        )
