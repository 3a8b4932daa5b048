"""Creates, commits, replaces and deletes checkpoint directories under a root.

    <root>/step-00000030/            a checkpoint; complete when it has a manifest
    <root>/step-00000030-1f3a9c2e/   one of the run 1f3a9c2e, which began beside checkpoints of another run
    <root>/latest                    one line: the name of the last committed checkpoint
    <root>/.tmp-step-00000040-*      being written
    <root>/.old-step-00000030-*      step 30, between the two renames that replace it by a new checkpoint of that step
    <root>/.trash-step-00000010-*    being deleted
    <root>/.latest-*                 the next `latest`, being written
    <root>/.owner, .owner-1 ...      the run that saves here (`lease`): the highest number counts

Temporary names end with 16 digits of the process that made them and 16 of their own. A process may be killed between
any two of these calls, and the machine may lose power: a complete checkpoint stays complete and is found. Only the
owner of a root may write to it (`ownership`); others may read. Nothing here is collective: only rank 0 calls it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from unishard.checkpoint import finding, headers, lease
from unishard.checkpoint import manifest as manifests
from unishard.checkpoint.disk import fsync
from unishard.checkpoint.manifest import Manifest
from unishard.errors import CheckpointError


def begin(root: Path, step: int, beside: str = "") -> Path:
    """Create the temporary directory of a checkpoint, and the root if it does not exist.

    Args:
        root: The folder of the checkpoints.
        step: The step.
        beside: As in `name_of`.

    Raises:
        CheckpointError: It cannot be created.
    """
    temporary = root / _hidden("tmp", finding.name_of(step, beside))
    with _os_errors(root, "cannot create a checkpoint here", "choose a writable folder"):
        root.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    return temporary


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest atomically. This completes the checkpoint: everything else is already on disk.

    Raises:
        CheckpointError: It cannot be written.
    """
    text = manifests.text_of(manifest)
    draft = folder / f".{manifests.FILE}-{uuid4().hex}"
    with _os_errors(
        folder,
        "cannot write the manifest",
        "free disk space, or choose another folder; earlier checkpoints are unchanged",
    ):
        _write(draft, text)
        draft.replace(folder / manifests.FILE)
        fsync(folder)


def commit(temporary: Path, root: Path, step: int, beside: str = "") -> Path:
    """Rename a complete checkpoint to its final name and update `latest`.

    A checkpoint of the same step is replaced, by two renames. Between them the old one has a name that begins with
    `.old-`, which `checkpoints` and `latest` find and `clean` renames back.

    Args:
        temporary: From `begin`, complete; the manifest was written last.
        root: As passed to `begin`.
        step: As passed to `begin`.
        beside: As passed to `begin`.

    Returns:
        The final directory.

    Raises:
        CheckpointError: It has no manifest, or cannot be renamed.
    """
    if not finding.is_checkpoint(temporary):
        raise CheckpointError(f"{temporary}: has no {manifests.FILE}; write the manifest before the commit")
    final = root / finding.name_of(step, beside)
    with _os_errors(root, f"cannot rename the checkpoint of step {step}", "earlier checkpoints are unchanged"):
        fsync(temporary)
        if os.path.lexists(final):
            final.rename(root / _hidden("old", final.name))
        temporary.rename(final)
        fsync(root)
        _point(root, final.name)
    for old in finding.set_aside(root):
        if old.name == final.name:
            discard(old.path)
    return final


def prune(
    root: Path,
    keep_last: int | None,
    keep_every: int | None,
    keep: Path,
    *,
    keep_best: int | None = None,
    best: str = "min",
    held: Collection[Path] = (),
) -> list[Path]:
    """Delete checkpoints of a run according to the retention settings. Only called after a commit.

    Never deletes `keep`, the checkpoint that `latest` returns, a checkpoint of another run, or a directory whose
    manifest cannot be read.

    Args:
        root: Where the checkpoints are.
        keep_last: How many of the run's most recently committed to keep; None keeps all.
        keep_every: Steps that are multiples of it are always kept.
        keep: The checkpoint just committed, of the run whose checkpoints may be deleted.
        keep_best: How many of the run's checkpoints with the best metric to keep; None for none.
        best: `min` or `max`: which metric is the best.
        held: Further ones that are not deleted now.

    Returns:
        The deleted directories.

    Raises:
        CheckpointError: A checkpoint cannot be deleted.
    """
    saved = headers.header_of(keep)
    if keep_last is None or saved is None:
        return []
    ages = {
        checkpoint: age
        for checkpoint in finding.checkpoints(root)
        if (age := finding.age_of(checkpoint)) is not None
        and (header := headers.header_of(checkpoint.path))
        and header.run == saved.run
    }
    order = sorted(ages, key=lambda checkpoint: ages[checkpoint])
    protected = {
        keep,
        finding.latest(root),
        *held,
        *(checkpoint.path for checkpoint in finding.ranked(ages, best)[: keep_best or 0]),
    }
    deleted = []
    for checkpoint in order[: max(0, len(order) - keep_last)]:
        if checkpoint.path not in protected and not (keep_every and checkpoint.step % keep_every == 0):
            discard(checkpoint.path)
            deleted.append(checkpoint.path)
    return deleted


def discard(folder: Path) -> None:
    """Delete a directory under a root. It is renamed first, so a half-deleted one is never taken for a checkpoint.

    Raises:
        CheckpointError: It cannot be deleted.
    """
    with _os_errors(folder, "cannot be deleted", "delete it manually"):
        left_over = finding.LEFT_OVER.fullmatch(folder.name)
        name = left_over["name"] if left_over else folder.name
        if finding.STEP.fullmatch(name or "") and not folder.name.startswith(".trash-"):
            folder = folder.rename(folder.with_name(_hidden("trash", name)))
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        else:
            folder.unlink(missing_ok=True)


def clean(root: Path, *, owns: bool = True) -> None:
    """Clean up after a killed run, or a save that failed.

    Called when a run that owns the root starts to save, and after a failure.

    An old checkpoint that was being replaced gets its name back; everything else that is incomplete is deleted.

    Args:
        root: Where the checkpoints are; need not exist.
        owns: Whether this process owns the root; if not, only what it has begun itself is deleted.

    Raises:
        CheckpointError: Something cannot be deleted.
    """
    for old in finding.set_aside(root) if owns else ():
        final = root / old.name
        if not finding.is_checkpoint(final):
            if os.path.lexists(final):
                discard(final)
            with _os_errors(old.path, f"cannot be renamed to {final.name}", "rename it manually"):
                old.path.rename(final)
    for entry in finding.entries(root):
        if finding.LEFT_OVER.fullmatch(entry) and (
            owns or (entry.startswith(".tmp-") and entry[-32:].startswith(lease.token()))
        ):
            discard(root / entry)


def _hidden(kind: str, name: str = "") -> str:
    return f".{kind}-{name}{'-' if name else ''}{lease.token()}{uuid4().hex[:16]}"


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _point(root: Path, name: str) -> None:
    draft = root / _hidden("latest")
    _write(draft, name + "\n")
    draft.replace(root / finding.LATEST)
    fsync(root)


@contextmanager
def _os_errors(path: Path, problem: str, instead: str) -> Iterator[None]:
    """Turn an OSError into one CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {problem} ({error.strerror}); {instead}") from None
