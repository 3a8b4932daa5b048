"""Checks that all ranks write into the same folder: on disks of single nodes, each would write a part of a checkpoint
to its own.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import uuid4

from unishard.checkpoint.disk import fsync
from unishard.distributed.on_ranks import Ranks
from unishard.errors import CheckpointError
from unishard.failures.rank_locations import describe

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
        ) from None
    return token


def _problem(folder: Path, token: str) -> str | None:
    try:
        content = (folder / _TOKEN).read_text(encoding="ascii", errors="replace")
    except OSError as error:
        return error.strerror or str(error)
    return None if content == token else "another file"


def _difference(path: Path, size: int) -> str | None:
    try:
        found_size = os.stat(path).st_size
    except OSError as error:
        return f"cannot be found ({error.strerror})"
    return None if found_size == size else f"has {found_size} bytes instead of {size}"


def _waited_for(problem: Callable[[], str | None]) -> str | None:
    """The problem that remains after a while; None as soon as there is none."""
    end = time.monotonic() + _PATIENCE
    while (remaining := problem()) is not None and time.monotonic() < end:
        time.sleep(0.05)
    return remaining
