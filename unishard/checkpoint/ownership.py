"""The directories of checkpoints that this run owns, so that no two runs save in one.

The process of rank 0 holds the leases.

All engines of a process are of one run: they may own a directory together, or one after the other.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from pathlib import Path
from weakref import WeakSet

import torch.distributed as dist

from unishard.checkpoint import lease
from unishard.distributed.on_ranks import on_first, ranks_of
from unishard.errors import CheckpointError


class _Owned:
    """A directory that this process owns, and the thread that shows that it lives."""

    def __init__(self, root: Path, run: str) -> None:
        self.process, self.run = os.getpid(), run
        self.lost = False
        self._root = root
        self._holders: WeakSet[object] = WeakSet()
        self._changing = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="unishard-owner", daemon=True)

    def add(self, holder: object) -> bool:
        """Own it for one more object; False if it was released."""
        with self._changing:
            self._holders.add(holder)
            if self._thread.ident is None:
                self._thread.start()
            return not self._closed.is_set()

    def discard(self, holder: object) -> None:
        """Own it for one object less; release it with the last one."""
        self._holders.discard(holder)
        self._close_if_unused()
        if self._closed.is_set():
            self._thread.join()

    def discard_all(self) -> None:
        """Release it."""
        self._holders.clear()
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        with self._changing:
            if not self._holders and not self._closed.is_set():
                self._closed.set()
                lease.release(self._root)

    def _beat(self) -> None:
        number = 0
        while not self._closed.wait(lease.BEAT) and not self.lost:
            number += 1
            with self._changing:
                if not self._closed.is_set():
                    self.lost = not lease.beat(self._root, number)
            self._close_if_unused()  # an engine that nobody has closed


_owned: dict[Path, _Owned] = {}


def own(
    root: Path, holder: object, run: Callable[[], str], group: dist.ProcessGroup | None, *, writes: bool = True
) -> None:
    """Make this run the owner of a directory, which is created if it does not exist. Collective.

    Args:
        root: The directory.
        holder: Owns it until `release`, or until it is deleted.
        run: Returns the id of the run; called on rank 0.
        group: A process group with a CPU backend.
        writes: Whether to raise an error if nothing can be written there; else such a directory is left as it is.

    Raises:
        CheckpointError: On every rank: another run that is alive owns it, or it cannot be written.
    """
    there = on_first(group, lambda: _other(root))
    # A rank on the machine of the former owner knows at once whether that has ended.
    gone = there is not None and any(ranks_of(group).gather(there.is_gone))
    on_first(group, lambda: _own(root, holder, run, there.owner if there is not None and gone else None, writes=writes))


def confirm(root: Path) -> None:
    """Check that this process still owns a directory that it has owned.

    Called by rank 0 before it changes anything there.

    Raises:
        CheckpointError: Another run has taken it over.
    """
    owned = _here(root)
    if owned is None:
        return
    there = lease.read(root)
    if there is None and not owned.lost and root.is_dir():  # somebody has deleted the files
        lease.acquire(root, owned.run)
        return
    if there is not None and there.owner != lease.token():
        owned.lost = True
    if owned.lost:
        who = "another run" if there is None or there.owner == lease.token() else str(there)
        raise CheckpointError(
            f"{root}: {who} has taken over this directory, because this run seemed to have ended; this run saves "
            "nothing more here and has deleted nothing of the other one. To go on, end one of them and start it again "
            "with another checkpoint.dir"
        )


def follow(root: Path, holder: object, run: Callable[[], str]) -> None:
    """Rank 0: `confirm`, or own the directory to which a link leads that was put in the place of the one owned.

    Raises:
        CheckpointError: Another run owns it, or it cannot be written.
    """
    if _here(root) is None:
        _own(root, holder, run, None, writes=True)
    else:
        confirm(root)


def is_lost(root: Path) -> bool:
    """Whether this process has owned a directory that is another run's now."""
    owned = _here(root)
    return owned is not None and (owned.lost or _other(root) is not None)


def release(holder: object, root: Path | None = None) -> None:
    """Release a directory, or all of them, unless another object of this process owns it too."""
    here = _owned.values() if root is None else filter(None, [_here(root)])
    for owned in [owned for owned in here if owned.process == os.getpid()]:
        owned.discard(holder)


def _own(root: Path, holder: object, run: Callable[[], str], gone: str | None, *, writes: bool) -> None:
    """Rank 0: become the owner."""
    owned = _here(root)
    if owned is not None and not owned.lost and owned.add(holder):
        confirm(root)
        return
    name = run()
    try:
        root.mkdir(parents=True, exist_ok=True)
        lease.acquire(root, name, gone)
    except OSError as error:
        if not writes:
            return
        raise CheckpointError(
            f"{root}: cannot create a checkpoint here ({error.strerror}); choose a writable folder"
        ) from error
    if not _owned:
        atexit.register(_release_all)
    owned = _owned[root.resolve()] = _Owned(root, name)
    owned.add(holder)


def _here(root: Path) -> _Owned | None:
    owned = _owned.get(root.resolve())
    return owned if owned is not None and owned.process == os.getpid() else None


def _other(root: Path) -> lease.Lease | None:
    """The owner of a directory, if it is another process."""
    there = lease.read(root)
    return None if there is None or there.owner == lease.token() else there


def _release_all() -> None:
    for owned in [owned for owned in _owned.values() if owned.process == os.getpid()]:
        owned.discard_all()
