"""The directories of checkpoints that this run owns, so that no two runs save in one.

The process of rank 0 holds the leases.

All engines of a process are of one run: they may own a directory together, or one after the other.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import uuid4
from weakref import WeakSet

import torch.distributed as dist

from unishard.checkpoint import lease
from unishard.checkpoint.files import fsync
from unishard.distributed.on_ranks import Ranks, on_first, ranks_of
from unishard.errors import CheckpointError
from unishard.failures.rank_locations import describe


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


# Checks that all ranks write into the same folder: on disks of single nodes, each would write a part of a checkpoint
# to its own.

_TOKEN = ".written-by-rank-0"
_PATIENCE = 5.0
"""Seconds until another node's file must be visible: a network file system may answer from a cache for a while."""


def require_shared(folder: Path, ranks: Ranks, shown: Path, setting: str) -> None:
    """Check that every rank sees the folder that rank 0 made, by a random token in a file. Collective.

    `unmark` removes the file.

    Args:
        folder: Exists on rank 0.
        ranks: The ranks that will write.
        shown: The folder that the user gave, for the message.
        setting: Where the user gave it.

    Raises:
        CheckpointError: On every rank: one of them does not see it, or rank 0 cannot write into it.
    """
    if ranks.world == 1:
        return
    token = ranks.each(lambda: _mark(folder) if ranks.rank == 0 else "")[0]
    views = ranks.gather((socket.gethostname(), _waited_for(lambda: _problem(folder, token))))
    blind = {rank: f"on {host}" for rank, (host, problem) in enumerate(views) if problem is not None}
    if blind:
        causes = ", ".join(dict.fromkeys(problem for _, problem in views if problem is not None))
        raise CheckpointError(
            f"{shown}: not the same folder on all ranks: {describe(blind, (), '')} cannot read what rank 0 on "
            f"{views[0][0]} wrote there ({causes}); {setting} must be on a disk that all nodes share"
        )


def unmark(folder: Path) -> None:
    """Remove the token; only rank 0 calls it.

    Raises:
        OSError: It cannot be removed.
    """
    (folder / _TOKEN).unlink(missing_ok=True)


def require_complete(folder: Path, files: Mapping[str, tuple[int, int]]) -> None:
    """Check that rank 0 sees what all ranks wrote; only rank 0 calls it.

    Args:
        folder: Where they wrote.
        files: Size and checksum of each file.

    Raises:
        CheckpointError: A file is missing or has another size.
    """
    for name, (size, _) in files.items():
        problem = _waited_for(lambda name=name, size=size: _difference(folder / name, size))  # type: ignore[misc]
        if problem is not None:
            raise CheckpointError(
                f"{folder / name}: {problem} on rank 0 (host {socket.gethostname()}), after another rank wrote it; all "
                "ranks must write to one disk that all nodes share"
            )


def _mark(folder: Path) -> str:
    token = uuid4().hex
    try:
        (folder / _TOKEN).write_text(token, encoding="ascii")
        fsync(folder / _TOKEN)  # to a server, so that other nodes see it
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be written ({error.strerror}); free disk space, or choose another folder"
        ) from error
    return token


def _problem(folder: Path, token: str) -> str | None:
    try:
        found = (folder / _TOKEN).read_text(encoding="ascii", errors="replace")
    except OSError as error:
        return error.strerror or str(error)
    return None if found == token else "another file"


def _difference(path: Path, size: int) -> str | None:
    try:
        found = os.stat(path).st_size
    except OSError as error:
        return f"cannot be found ({error.strerror})"
    return None if found == size else f"has {found} bytes instead of {size}"


def _waited_for(problem: Callable[[], str | None]) -> str | None:
    """What is still wrong after a while; None once nothing is."""
    end = time.monotonic() + _PATIENCE
    while (found := problem()) is not None and time.monotonic() < end:
        time.sleep(0.05)
    return found
