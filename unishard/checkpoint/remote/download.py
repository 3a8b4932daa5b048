"""A checkpoint at a URL, for a load: the ranks of a node fetch it together to a temporary directory of the node."""

from __future__ import annotations

import logging
import shutil
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist

from unishard.checkpoint import manifest as manifests
from unishard.checkpoint.remote import fetching
from unishard.checkpoint.remote.copies import Copies, copies_at
from unishard.checkpoint.remote.copying import node_of
from unishard.checkpoint.remote.store import Store
from unishard.distributed.on_ranks import on_all, on_first, ranks_of
from unishard.errors import CheckpointError

_logger = logging.getLogger("unishard")


class Download:
    """A checkpoint on this node, until it is closed."""

    def __init__(self, url: str, group: dist.ProcessGroup) -> None:
        """Fetch it. Collective.

        Args:
            url: Of a checkpoint, or of checkpoints, of which the newest complete one is fetched.
            group: All ranks, on the host.

        Raises:
            CheckpointError: On every rank: there is none, or it cannot be fetched.
        """
        ranks = ranks_of(group)
        node = node_of(ranks)
        self._opened = ExitStack()
        try:
            self.url = on_first(group, lambda: _newest(url))
            """Of the checkpoint."""
            above, _, name = self.url.rpartition("/")
            begun = on_all(group, lambda: self._begin(name) if ranks.rank == node.ranks[0] else None)
            coming = ranks.gather(begun and begun[1])[node.ranks[0]]
            if ranks.rank == 0:
                _logger.warning("%s: fetching it to %s", self.url, coming.folder.parent)
            share = coming.files[node.ranks.index(ranks.rank) :: len(node.ranks)]
            on_all(group, lambda: fetching.get(Store(above), coming, share))
            on_all(group, lambda: begun and fetching.finish(*begun, coming.folder.parent))
        except BaseException:
            self.close()
            raise
        self.folder: Path = coming.folder.parent / name
        """Where it is."""

    def close(self) -> None:
        """Delete it, on the rank that has begun it."""
        self._opened.close()

    def _begin(self, name: str) -> tuple[Copies, fetching.Coming]:
        """The first rank of the node: make the directory."""
        root = Path(self._opened.enter_context(TemporaryDirectory(prefix="unishard-fetched-")))
        copies = self._opened.enter_context(copies_at(self.url))
        needed = sum(file.bytes for file in manifests.read(copies.manifests / name).files.values())
        free = shutil.disk_usage(root).free
        if needed > free:
            raise CheckpointError(
                f"{self.url}: is {needed / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free in {root.parent}; set "
                "TMPDIR to a directory on each node with more room"
            )
        return copies, fetching.begin(copies, name, root)


def _newest(url: str) -> str:
    with copies_at(url) as copies:
        return f"{copies.store.url}/{copies.require_newest().name}"
