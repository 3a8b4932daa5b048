"""Deletes from a store what is not kept, and what killed runs have left."""

from __future__ import annotations

from pathlib import Path

from unishard.checkpoint import directory, finding
from unishard.checkpoint import manifest as manifests
from unishard.checkpoint.files import read_bytes
from unishard.checkpoint.finding import FoundCheckpoint
from unishard.checkpoint.headers import header_of
from unishard.checkpoint.remote.copies import Copies, name_of
from unishard.checkpoint.saving import Retention


def clean(copies: Copies, newest: str, retention: Retention, root: Path) -> None:
    """Delete copies, after one was completed: as in a directory, and one that was replaced by a save of the same step.

    Args:
        copies: The store.
        newest: The name of the copy that was completed.
        retention: What is kept.
        root: The directory whose checkpoints are copied: what it has may still be incomplete in the store.

    Raises:
        StoreError: The store has failed.
    """
    copies.refresh()
    last, every, keep_best, best = retention
    kept = copies.manifests / newest
    old = _replaced(copies.manifests, kept)
    for path in old:
        directory.discard(path)
    old += directory.prune(copies.manifests, last, every, kept, keep_best=keep_best, best=best)
    coming = {_copy_of(checkpoint) for checkpoint in finding.checkpoints(root)}
    for name in [path.name for path in old] + [name for name in copies.incomplete if name not in coming]:
        copies.delete(name)


def _replaced(manifests_of_copies: Path, newest: Path) -> list[Path]:
    """Older checkpoints of the same run and step."""
    header, match = header_of(newest), finding.STEP.fullmatch(newest.name)
    return [
        other.path
        for other in finding.checkpoints(manifests_of_copies)
        if match
        and other.step == int(match["step"])
        and header
        and (there := header_of(other.path))
        and (there.run, there.commit < header.commit) == (header.run, True)
    ]


def _copy_of(checkpoint: FoundCheckpoint) -> str | None:
    """The name that a copy has; None if the checkpoint was deleted."""
    try:
        return name_of(checkpoint.step, read_bytes(checkpoint.path / manifests.FILE))
    except OSError:
        return None
