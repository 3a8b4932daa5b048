"""The copies of one run: `checkpoint.copy_to`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import torch.distributed as dist

from unishard.checkpoint import finding
from unishard.checkpoint.headers import header_of
from unishard.checkpoint.remote import fetching
from unishard.checkpoint.remote.cleaning import clean
from unishard.checkpoint.remote.copies import Copies
from unishard.checkpoint.remote.copying import Tell, copy_checkpoint, copy_export, node_of
from unishard.checkpoint.remote.owner import StoreOwner
from unishard.checkpoint.remote.store import Store, StoreError
from unishard.checkpoint.remote.uploads import Upload, Uploads
from unishard.checkpoint.saving import Retention
from unishard.distributed.on_ranks import on_all, on_first, ranks_of
from unishard.errors import CheckpointError

_logger = logging.getLogger("unishard")


class RunCopies:
    """What a run has copied to a store, and copies there. Every rank has one; not every rank copies."""

    def __init__(
        self,
        url: str,
        root: Path,
        retention: Retention,
        group: dist.ProcessGroup,
        *,
        writes: bool,
        refuses: bool,
        run: Callable[[], str],
    ) -> None:
        """Open the store, and become the one run that copies there. Collective.

        Args:
            url: `checkpoint.copy_to`.
            root: `checkpoint.dir`.
            retention: Which copies are kept.
            group: All ranks, on the host.
            writes: Whether the run saves.
            refuses: Whether it must not begin beside checkpoints of another run.
            run: Returns its id, on rank 0.

        Raises:
            CheckpointError: On every rank: another run copies there, or nothing can be written there.
        """
        self._root, self._retention, self._refuses, self._run = root, retention, refuses, run
        self._store = Store(url, "checkpoint.copy_to")
        ranks = ranks_of(group)
        self._node = node_of(ranks)
        self._uploads = Uploads(self._store.url) if writes and ranks.rank == self._node.ranks[0] else None
        self._copies = Copies(self._store) if ranks.rank == 0 else None
        self._owner = StoreOwner(self._store, run) if ranks.rank == 0 and writes else None
        self._is_known = False
        """Whether it is known what the store holds."""
        self._copying: Path | None = None
        try:
            if writes:
                on_first(group, self._begin)
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Where they are."""
        return self._store.url

    @property
    def known(self) -> Path | None:
        """On rank 0, a directory with the manifests of the copies that were there when the run began."""
        return None if self._copies is None else self._copies.manifests

    @property
    def copying(self) -> Collection[Path]:
        """The checkpoint that is being copied, on rank 0."""
        now = self._copying
        return () if now is None else (now,)

    @property
    def last_commit(self) -> int:
        """The highest number of a commit in the store, on rank 0."""
        return 0 if self._copies is None else finding.next_commit(self._copies.manifests) - 1

    def _begin(self) -> None:
        """Rank 0: own the store and look what it holds; a server that is away is no error yet."""
        assert self._copies is not None
        assert self._owner is not None
        try:
            self._owner.claim()
            self._copies.refresh()
            self._is_known = True
        except StoreError as error:
            if error.is_proof:
                raise CheckpointError(
                    f"checkpoint.copy_to: {error}; write a place that exists and is writable"
                ) from None
            _logger.warning("checkpoint.copy_to: %s; checkpoints are copied as soon as it answers", error)

    def fetch(self, which: str, best: str, group: dist.ProcessGroup) -> None:
        """Fetch the newest checkpoint, or the best one, unless `checkpoint.dir` has it or a newer one. Collective.

        Raises:
            CheckpointError: On every rank.
        """
        coming = on_first(group, lambda: self._begin_to_fetch(which, best))
        if coming is None:
            return
        try:
            share = coming.files[dist.get_rank(group) :: dist.get_world_size(group)]
            on_all(group, lambda: fetching.get(self._store, coming, share))
            on_first(group, lambda: fetching.finish(self._copies, coming, self._root) if self._copies else None)
        except BaseException:
            if self._copies is not None:
                fetching.give_up(coming)
            raise

    def _begin_to_fetch(self, which: str, best: str) -> fetching.Coming | None:
        """Rank 0: choose a checkpoint, and make its directory."""
        assert self._copies is not None
        try:
            self._copies.refresh()
            self._is_known = True
        except StoreError as error:
            if finding.latest(self._root) is None:
                raise CheckpointError(
                    f"{error}; so it is not known whether a checkpoint is there, and {self._root} has none; start "
                    "again when it answers, or without checkpoint.copy_to"
                ) from None
            _logger.warning("%s; the newest checkpoint is looked for only in %s", error, self._root)
            return None
        newest = fetching.newer(self._copies, self._root)
        found = fetching.better(self._copies, self._root, best) if which == "best" else newest
        if found is None:
            return None
        _logger.warning("%s: fetching the %s checkpoint, %s, to %s", self._store.url, which, found.name, self._root)
        return fetching.begin(self._copies, found.name, self._root)

    def saved(self, folder: Path) -> None:
        """Copy a complete checkpoint soon."""
        if self._uploads is not None:
            self._uploads.add(Upload(str(folder), partial(self._copy, folder)))

    def exported(self, folder: Path) -> None:
        """Copy an export soon."""
        if self._uploads is not None and self._node.is_first:
            self._uploads.add(Upload(str(folder), partial(copy_export, self._store, folder)))

    def catch_up(self, run: str) -> None:
        """Copy what an earlier process of a run has saved and not copied, soon."""
        for checkpoint in finding.checkpoints(self._root):
            header = header_of(checkpoint.path)
            if header is not None and header.run == run:
                self.saved(checkpoint.path)

    def close(self) -> None:
        """Wait for the copies."""
        try:
            if self._uploads is not None:
                self._uploads.close()
        finally:
            if self._owner is not None:
                self._owner.release()
            if self._copies is not None:
                self._copies.close()
            self._store.close()

    def _copy(self, folder: Path, stopped: threading.Event, tell: Tell) -> None:
        """Copy this node's part of a checkpoint, in the background."""
        if self._copies is None or self._owner is None:
            copy_checkpoint(self._store, folder, self._node, lambda: None, stopped, tell)
            return
        self._owner.claim()
        self._admit(self._copies)
        self._copying = folder
        try:
            name = copy_checkpoint(self._store, folder, self._node, self._owner.claim, stopped, tell)
        finally:
            self._copying = None
        if name is not None:
            _logger.info("%s: copied to %s/%s", folder, self._store.url, name)
            clean(self._copies, name, self._retention, self._root)

    def _admit(self, copies: Copies) -> None:
        """Check a store that did not answer when the run began."""
        if self._is_known:
            return
        copies.refresh()
        there, here = finding.latest(copies.manifests), finding.latest(self._root)
        copied, local = there and header_of(there), here and header_of(here)
        if copied and local and (copied.commit > local.commit or (self._refuses and copied.run != self._run())):
            raise CheckpointError(
                f"{self._store.url}: holds checkpoints that this run has not resumed from, the newest of the run "
                f"{copied.run}; nothing is copied there; set another checkpoint.copy_to"
            )
        self._is_known = True
