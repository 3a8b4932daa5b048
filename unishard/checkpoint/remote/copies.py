"""The checkpoints in a store.

    <url>/step-00000030-5c1b22f0/   a checkpoint; complete when it has a manifest, which is copied last
    <url>/.owner                    the run that copies here (`owner`)

The eight digits are the CRC-32 of the manifest. So a folder never gets other content, and what a killed run has left of
one is continued. The folders have names as in a directory of checkpoints: copied to a disk, they are one.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from unishard.checkpoint import finding
from unishard.checkpoint import manifest as manifests
from unishard.checkpoint.finding import FoundCheckpoint
from unishard.checkpoint.remote.store import Store
from unishard.errors import CheckpointError


def name_of(step: int, manifest: bytes) -> str:
    """The name of a checkpoint in a store."""
    return finding.name_of(step, f"{zlib.crc32(manifest):08x}")


@contextmanager
def copies_at(url: str) -> Iterator[Copies]:
    """The checkpoints under a URL, or the one that it names.

    Raises:
        ConfigError: A package for this scheme is not installed, or nobody knows the scheme.
        StoreError: The store has failed.
    """
    above, _, name = url.rstrip("/").rpartition("/")
    is_one = bool(finding.STEP.fullmatch(name)) and manifests.FILE in Store(url).names()
    copies = Copies(Store(above if is_one else url))
    try:
        copies.refresh([name] if is_one else None)
        yield copies
    finally:
        copies.close()


class Copies:
    """The checkpoints under a URL. Methods raise StoreError."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._temporary = TemporaryDirectory(prefix="unishard-manifests-")
        self.manifests = Path(self._temporary.name)
        """A directory of the complete checkpoints as of the last `refresh`, in which each has only its manifest."""
        self.incomplete: list[str] = []

    def refresh(self, only: list[str] | None = None) -> None:
        """Look what is there, or whether these checkpoints are."""
        there = self.store.names() if only is None else dict.fromkeys(only)
        names = [name for name, size in there.items() if size is None and finding.STEP.fullmatch(name)]
        self.incomplete = []
        for name in names:
            here = self.manifests / name
            if manifests.FILE not in self.store.names(name):
                self.incomplete.append(name)
            elif not finding.is_checkpoint(here) and (text := self.store.read(f"{name}/{manifests.FILE}")) is not None:
                here.mkdir(exist_ok=True)
                (here / "draft").write_bytes(text)
                (here / "draft").replace(here / manifests.FILE)
        for name in finding.entries(self.manifests):
            if name not in names or name in self.incomplete:
                shutil.rmtree(self.manifests / name, ignore_errors=True)

    @property
    def newest(self) -> FoundCheckpoint | None:
        """The newest complete one as of the last `refresh`, by its manifest; None if there is none."""
        newest = finding.latest(self.manifests)
        return next((each for each in finding.checkpoints(self.manifests) if each.path == newest), None)

    def require_newest(self) -> FoundCheckpoint:
        """The same.

        Raises:
            CheckpointError: There is none.
        """
        if (newest := self.newest) is None:
            url = self.store.url
            raise CheckpointError(f"{url}: no complete checkpoint; run `unishard checkpoint list {url}`")
        return newest

    def delete(self, name: str) -> None:
        """Delete a checkpoint: its manifest first, so that half of it is never taken for one."""
        self.store.delete(f"{name}/{manifests.FILE}")
        self.store.delete_folder(name)

    def close(self) -> None:
        """Delete the manifests on this disk."""
        self._temporary.cleanup()
