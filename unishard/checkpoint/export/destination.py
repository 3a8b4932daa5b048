"""The folder that an export writes to: a new or an empty one, or an earlier export that it replaces."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from unishard.checkpoint.disk import fsync
from unishard.errors import CheckpointError


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
            f"{folder} exists and is not an empty folder; pass overwrite=True (`unishard export --overwrite`) to "
            "replace the export that it holds, or choose another folder"
        )
    if not any(folder.glob("*.safetensors")) or Path.cwd().is_relative_to(folder.resolve()):
        return (
            f"{folder} is no folder of an earlier export, so overwrite does not replace it; choose another folder, "
            "or remove it"
        )
    return None


def hidden(folder: Path, kind: str) -> Path:
    """A name beside a folder that nothing has yet."""
    folder = _target(folder)
    return folder.parent / f".{kind}-{folder.name}-{uuid.uuid4().hex[:8]}"


def move_in(draft: Path, folder: Path, *, overwrite: bool) -> None:
    """Give a complete folder its name, in place of what has it. At no time does it hold files of both.

    Raises:
        CheckpointError: Something else has come there.
        OSError: It cannot be renamed; then the earlier folder has its name again.
    """
    require_free(folder, overwrite=overwrite)
    folder = _target(folder)
    old = hidden(folder, "old")
    replaces = folder.is_dir() and any(folder.iterdir())
    if replaces:
        folder.rename(old)
    try:
        draft.rename(folder)
    except OSError:
        if replaces:
            old.rename(folder)
        raise
    fsync(folder.parent)
    if replaces:
        shutil.rmtree(old, ignore_errors=True)


def _target(folder: Path) -> Path:
    """Where a link leads, so that the link stays."""
    return folder.resolve() if folder.is_symlink() else folder
