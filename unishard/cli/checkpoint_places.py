"""Where `unishard checkpoint` finds a checkpoint: in a directory, or at a URL, from which it is fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from unishard.cli.bar import bar
from unishard.cli.checkpoint_tables import left_over, listed
from unishard.config.paths import url_of
from unishard.errors import CheckpointError

if TYPE_CHECKING:
    from unishard.checkpoint.remote.copies import Copies


class ReachedCheckpoint(NamedTuple):
    """A checkpoint."""

    folder: Path
    """Its directory on this machine."""
    shown: str
    """What the user knows it as."""
    size: Callable[[], int]
    """Its bytes."""


@contextmanager
def checkpoint_at(where: Path, *, whole: bool = True) -> Iterator[ReachedCheckpoint]:
    """The checkpoint that a user means, or the newest one there.

    Args:
        where: What was given: a checkpoint, a directory of checkpoints, or a URL of either.
        whole: Whether more than the manifest is needed.

    Raises:
        CheckpointError: There is none, or it cannot be fetched.
    """
    from unishard.checkpoint import finding
    from unishard.cli.checkpoint_facts import size_of

    url = url_of(where)
    if url is None:
        folder = finding.locate(where)
        yield ReachedCheckpoint(folder, str(folder), lambda: size_of(folder))
        return
    from unishard.checkpoint.remote.copies import copies_at

    with copies_at(url) as copies:
        newest = copies.require_newest()
        sizes = copies.store.sizes(newest.name)
        shown = f"{copies.store.url}/{newest.name}"
        if not whole:
            yield ReachedCheckpoint(newest.path, shown, lambda: sum(sizes.values()))
            return
        with TemporaryDirectory(prefix="unishard-fetched-") as root:
            yield ReachedCheckpoint(_fetched(copies, newest.name, Path(root), sum(sizes.values())), shown, lambda: 0)


def listed_in(root: Path) -> list[dict[str, Any]]:
    """The checkpoints in a directory, as objects of `unishard checkpoint list --json`.

    Raises:
        CheckpointError: It is none.
    """
    from unishard.checkpoint import finding

    if not root.is_dir():
        raise CheckpointError(f"{root}: directory not found; name a directory of checkpoints")
    if finding.is_checkpoint(root):
        raise CheckpointError(
            f"{root}: is a single checkpoint; name its parent directory, or run `unishard checkpoint inspect`"
        )
    latest = finding.latest(root)
    entries = [listed(checkpoint.path, checkpoint.step, latest) for checkpoint in finding.checkpoints(root)]
    return entries + [left_over(root / name) for name in finding.incomplete(root)]


def listed_at(url: str) -> list[dict[str, Any]]:
    """The checkpoints at a URL, as objects of `unishard checkpoint list --json`."""
    from unishard.checkpoint import finding
    from unishard.checkpoint.remote.copies import copies_at

    with copies_at(url) as copies:
        latest = finding.latest(copies.manifests)
        entries = [listed(found.path, found.step, latest) for found in finding.checkpoints(copies.manifests)]
        entries += [left_over(copies.manifests / name) for name in copies.incomplete]
        return [entry | {"bytes": sum(copies.store.sizes(entry["name"]).values())} for entry in entries]


def _fetched(copies: Copies, name: str, root: Path, total: int) -> Path:
    from unishard.checkpoint.remote import fetching

    coming = fetching.begin(copies, name, root)
    with bar(f"fetching {name}", total) as advance:
        fetching.get(copies.store, coming, coming.files, advance)
    return fetching.finish(copies, coming, root)
