"""The life of checkpoint directories under a root: begun, committed, found, replaced, deleted.

    <root>/step-00000030/            a checkpoint; complete when it has a manifest
    <root>/latest                    one line: the name of the one committed last
    <root>/.tmp-step-00000040-*      being written
    <root>/.old-step-00000030-*      stands in for step 30 between the two renames by which a new checkpoint of that step replaces it
    <root>/.trash-step-00000010-*    being deleted
    <root>/.latest-*                 the next `latest`, being written

A process may be killed between any two of these calls, and the machine may lose power: what was complete stays complete and is found.
One process at a time writes to a root; others may read. Nothing here is collective: rank 0 calls it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from unishard.checkpoint import manifest as manifests
from unishard.checkpoint.disk import fsync
from unishard.checkpoint.finding import (
    LATEST,
    LEFT_OVER,
    STEP,
    FoundCheckpoint,
    age_of,
    checkpoints,
    entries,
    incomplete,
    is_checkpoint,
    latest,
    locate,
    name_of,
    set_aside,
)
from unishard.checkpoint.manifest import Manifest
from unishard.errors import CheckpointError

__all__ = [
    "LATEST",
    "FoundCheckpoint",
    "begin",
    "checkpoints",
    "clean",
    "commit",
    "discard",
    "incomplete",
    "is_checkpoint",
    "latest",
    "locate",
    "name_of",
    "prune",
    "write_manifest",
]


def begin(root: Path, step: int) -> Path:
    """Make the temporary directory that a checkpoint is written into; also the root where there is none.

    Raises:
        CheckpointError: It cannot be made.
    """
    temporary = root / _hidden("tmp", step)
    with _telling(root, "no checkpoint can be written here", "name a folder that is writable"):
        root.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    return temporary


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, whole or not at all, which makes the checkpoint complete: everything else is on the disk before.

    Raises:
        CheckpointError: It cannot be written.
    """
    text = manifests.text_of(manifest)
    draft = folder / f".{manifests.FILE}-{uuid4().hex}"
    with _telling(folder, "the manifest cannot be written", "make room, or name another folder; former checkpoints are as they were"):
        _write(draft, text)
        draft.replace(folder / manifests.FILE)
        fsync(folder)


def commit(temporary: Path, root: Path, step: int) -> Path:
    """Give a complete checkpoint its name, and `latest` its new content.

    Where there is a checkpoint of this step already, the new one takes its place. Two renames do that; between them the old one
    has a name beginning with `.old-`, under which `checkpoints` and `latest` find it, and `clean` gives it its own name back.

    Args:
        temporary: From `begin`, with everything in it, the manifest last.
        root: Of the same call.
        step: Of the same call.

    Returns:
        Where the checkpoint is now.

    Raises:
        CheckpointError: It has no manifest, or cannot be renamed.
    """
    if not is_checkpoint(temporary):
        raise CheckpointError(f"{temporary}: cannot become a checkpoint without its {manifests.FILE}; write that before the commit")
    final = root / name_of(step)
    with _telling(root, f"the checkpoint of step {step} cannot be put in its place", "former checkpoints are as they were"):
        fsync(temporary)
        if os.path.lexists(final):
            final.rename(root / _hidden("old", step))
        temporary.rename(final)
        fsync(root)
        _point(root, final.name)
    for old in set_aside(root):
        if old.step == step:
            discard(old.path)
    return final


def prune(root: Path, keep_last: int | None, keep_every: int | None, keep: Path) -> list[Path]:
    """Delete what retention no longer wants. Only called after a commit.

    Never deleted: `keep`, what `latest` finds, and a directory whose manifest cannot be read.

    Args:
        root: Where the checkpoints are.
        keep_last: How many are kept, those that were written last; None keeps all.
        keep_every: Steps that are multiples of it are kept for good.
        keep: The one just committed.

    Returns:
        Where those were that are deleted now.

    Raises:
        CheckpointError: One cannot be deleted.
    """
    if keep_last is None:
        return []
    ages = {found: age for found in checkpoints(root) if (age := age_of(found)) is not None}
    order = sorted(ages, key=lambda found: ages[found])
    kept = {keep, latest(root)}
    deleted = []
    for found in order[: max(0, len(order) - keep_last)]:
        if found.path not in kept and not (keep_every and found.step % keep_every == 0):
            discard(found.path)
            deleted.append(found.path)
    return deleted


def discard(folder: Path) -> None:
    """Delete a directory below a root. From the first moment on it is no checkpoint any more.

    Raises:
        CheckpointError: It cannot be deleted.
    """
    with _telling(folder, "cannot be deleted", "delete it by hand"):
        if (named := STEP.search(folder.name)) and not folder.name.startswith(".trash-"):
            folder = folder.rename(folder.with_name(_hidden("trash", int(named[1]))))
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        else:
            folder.unlink(missing_ok=True)


def clean(root: Path, but: Path | None = None) -> None:
    """Put in order what a killed run has left. Called when a run starts to save; no other run may be saving to this root.

    An old checkpoint that was about to be replaced gets its name back; everything else that is not complete goes.

    Args:
        root: Where the checkpoints are; it need not be there.
        but: A temporary directory that is in use.

    Raises:
        CheckpointError: Something cannot be deleted.
    """
    for old in set_aside(root):
        final = root / name_of(old.step)
        if not is_checkpoint(final):
            if os.path.lexists(final):
                discard(final)
            with _telling(old.path, f"cannot be renamed to {final.name}", "do so by hand"):
                old.path.rename(final)
    for entry in entries(root):
        if LEFT_OVER.fullmatch(entry) and root / entry != but:
            discard(root / entry)


def _hidden(kind: str, step: int) -> str:
    return f".{kind}-{name_of(step)}-{uuid4().hex}"


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _point(root: Path, name: str) -> None:
    draft = root / f".latest-{uuid4().hex}"
    _write(draft, name + "\n")
    draft.replace(root / LATEST)
    fsync(root)


@contextmanager
def _telling(path: Path, what: str, instead: str) -> Iterator[None]:
    """What the operating system refuses, as one message."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {what} ({error.strerror}); {instead}") from error
