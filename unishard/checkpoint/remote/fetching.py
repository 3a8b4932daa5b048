"""Fetches checkpoints from a store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from unishard.checkpoint import directory, finding, headers
from unishard.checkpoint import manifest as manifests
from unishard.checkpoint.disk import fsync
from unishard.checkpoint.finding import FoundCheckpoint
from unishard.checkpoint.inside_folder import leaves
from unishard.checkpoint.remote.copies import Copies
from unishard.checkpoint.remote.store import Store
from unishard.errors import CheckpointError


class Coming(NamedTuple):
    """A checkpoint that is being fetched."""

    name: str
    folder: Path
    """Where its files go."""
    files: tuple[str, ...]


def newer(copies: Copies, root: Path) -> FoundCheckpoint | None:
    """The newest checkpoint of a store if it is newer than those of a directory; None if not.

    Raises:
        CheckpointError: It is of another run, of which this directory has nothing.
    """
    found, here = copies.newest, finding.latest(root)
    if found is None or here is None:
        return found
    copied, local = headers.header_of(found.path), headers.header_of(here)
    if copied is None or local is None or copied.commit <= local.commit:
        return None
    runs = {header.run for each in finding.checkpoints(root) if (header := headers.header_of(each.path))}
    if copied.run not in runs:
        raise CheckpointError(
            f"{copies.store.url}: holds checkpoints of the run {copied.run}, the newest of step {found.step}, and "
            f"{root} those of the run {local.run}; set another checkpoint.copy_to, or to continue the run "
            f"{copied.run}, another checkpoint.dir"
        )
    return found


def better(copies: Copies, root: Path, direction: str) -> FoundCheckpoint | None:
    """The best checkpoint of the newest run in a store, if it is better than that of a directory; None if not."""
    there, here = finding.best(copies.manifests, direction), finding.best(root, direction)
    both = [
        each
        for place, path in ((copies.manifests, there), (root, here))
        for each in finding.checkpoints(place)
        if each.path == path
    ]
    first = next(iter(finding.ranked(reversed(both), direction)), None)
    return first if first is not None and first.path == there else None


def begin(copies: Copies, name: str, root: Path) -> Coming:
    """Make the directory for the files of a checkpoint, under a temporary name.

    Raises:
        CheckpointError: The manifest is damaged, or nothing can be written.
    """
    facts = manifests.read(copies.manifests / name)
    if bad := next(filter(leaves, facts.files), None):
        raise CheckpointError(f"{copies.store.url}/{name}: {bad!r:.200} lies outside; do not trust this checkpoint")
    match = finding.STEP.fullmatch(name)
    assert match is not None
    folder = directory.begin(root, int(match["step"]), match["run"] or "")
    for parent in {(folder / file).parent for file in facts.files}:
        parent.mkdir(parents=True, exist_ok=True)
    return Coming(name, folder, tuple(facts.files))


def get(store: Store, coming: Coming, files: Iterable[str], advance: Callable[[int], None] = lambda read: None) -> None:
    """Fetch some of the files.

    Raises:
        CheckpointError: A file cannot be fetched or written.
    """
    for file in files:
        store.get(f"{coming.name}/{file}", coming.folder / file)
        fsync(coming.folder / file)
        advance((coming.folder / file).stat().st_size)


def finish(copies: Copies, coming: Coming, root: Path) -> Path:
    """Complete a checkpoint that all ranks have fetched, unless another process has done so; returns it."""
    (coming.folder / manifests.FILE).write_bytes((copies.manifests / coming.name / manifests.FILE).read_bytes())
    fsync(coming.folder / manifests.FILE)
    if finding.is_checkpoint(root / coming.name):
        directory.discard(coming.folder)
        return root / coming.name
    match = finding.STEP.fullmatch(coming.name)
    assert match is not None
    return directory.commit(coming.folder, root, int(match["step"]), match["run"] or "")


def give_up(coming: Coming) -> None:
    """Delete what was fetched of a checkpoint."""
    with contextlib.suppress(CheckpointError):
        directory.discard(coming.folder)
