"""The folder that an export writes to: a new or an empty one, or an earlier export that it replaces."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
import uuid
from pathlib import Path

from unishard.checkpoint import lease
from unishard.checkpoint.disk import fsync
from unishard.errors import CheckpointError

_DAY = 24 * 60 * 60
"""Seconds after which the draft of a process on another machine is left over."""


def require_free(folder: Path, *, overwrite: bool) -> None:
    """Check that an export may write to a folder.

    Raises:
        CheckpointError: It may not.
    """
    if problem := problem_with(folder, overwrite=overwrite):
        raise CheckpointError(problem)


def problem_with(folder: Path, *, overwrite: bool) -> str | None:
    """Why an export may not write to a folder; None if it may.

    Args:
        folder: The folder.
        overwrite: Whether an earlier export may be replaced. Anything else is never deleted.
    """
    try:
        return _problem(folder, overwrite)
    except OSError as error:
        return f"{folder}: cannot be read ({error.strerror}); choose another folder"


def _problem(folder: Path, overwrite: bool) -> str | None:
    if not os.path.lexists(folder):
        return None
    if not folder.is_dir():
        return f"{folder} exists and is not a folder; choose another one"
    if not any(folder.iterdir()):
        return None
    if not overwrite:
        return (
            f"{folder} exists and is not an empty folder; pass overwrite=True (`unishard checkpoint export "
            "--overwrite`) to replace the export that it holds, or choose another folder"
        )
    if not any(folder.glob("*.safetensors")) or Path.cwd().is_relative_to(folder.resolve()):
        return (
            f"{folder} is no folder of an earlier export, so overwrite does not replace it; choose another folder, "
            "or remove it"
        )
    return None


def begin(folder: Path) -> Path:
    """Make the draft of an export beside its folder, with a lease of this process."""
    draft = _hidden(_target(folder), "tmp")
    draft.parent.mkdir(parents=True, exist_ok=True)
    draft.mkdir()
    try:
        lease.acquire(draft, "export")
    except OSError:
        _discard(draft)
        raise
    return draft


def clean(folder: Path) -> None:
    """Clean up after a killed export, unless another one writes to this folder now.

    An earlier export that was being replaced gets its name back; everything else that is incomplete is deleted.
    """
    folder = _target(folder)
    left = _left_over(folder)
    if any(_is_written(path) for path in left if path.name.startswith(".tmp-")):
        return
    old = [path for path in left if path.name.startswith(".old-")]
    if old and not os.path.lexists(folder):
        newest = max(old, key=lambda path: path.stat().st_mtime_ns)
        newest.rename(folder)
        fsync(folder.parent)
        left.remove(newest)
    for path in left:
        _discard(path)


def move_in(draft: Path, folder: Path, *, overwrite: bool) -> None:
    """Give a complete draft the name of its folder, in place of what has it. At no time does it hold files of both.

    Raises:
        CheckpointError: Something else has come there.
        OSError: It cannot be renamed; then the earlier folder has its name again.
    """
    require_free(folder, overwrite=overwrite)
    folder = _target(folder)
    old = _hidden(folder, "old")
    replaces = folder.is_dir() and any(folder.iterdir())
    if replaces:
        folder.rename(old)
    try:
        draft.rename(folder)
    except OSError:
        if replaces:
            old.rename(folder)
        raise
    (folder / lease.FILE).unlink()
    fsync(folder.parent)
    if replaces:
        _discard(old)


def _hidden(folder: Path, kind: str) -> Path:
    """A name beside a folder that nothing has yet."""
    return folder.parent / f".{kind}-{folder.name}-{uuid.uuid4().hex[:8]}"


def _left_over(folder: Path) -> list[Path]:
    """What exports to a folder have left beside it, or are writing."""
    name = re.compile(rf"\.(?:tmp|old|trash)-{re.escape(folder.name)}-[0-9a-f]{{8}}")
    try:
        return [folder.parent / entry for entry in os.listdir(folder.parent) if name.fullmatch(entry)]
    except FileNotFoundError:
        return []


def _is_written(draft: Path) -> bool:
    """Whether an export may still write a draft: its process has not ended for certain, and wrote within a day."""
    there = lease.read(draft)
    return there is not None and not there.is_gone and time.time() - draft.stat().st_mtime < _DAY


def _discard(folder: Path) -> None:
    """Delete a folder; a half-deleted one is never taken for an export."""
    trash = folder.with_name(re.sub(r"^\.old-", ".trash-", folder.name))
    with contextlib.suppress(OSError):
        folder.rename(trash)
        shutil.rmtree(trash)


def _target(folder: Path) -> Path:
    """Where a link leads, so that the link stays."""
    return folder.resolve() if folder.is_symlink() else folder
