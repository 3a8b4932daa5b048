"""Opens files of a checkpoint: a pipe or a device in place of one would make a reader wait, or read, forever."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path, PurePath

from unishard.errors import ContractError


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading.

    Raises:
        OSError: It cannot be opened, or is not a file.
    """
    return open(path, "rb", opener=_open_file)


def path_of(given: str | Path, call: str) -> Path:
    """The path that a caller has given.

    Args:
        given: The path.
        call: The method that it was given to.

    Raises:
        ContractError: No file can have this name.
    """
    try:
        os.fsencode(given)
    except (TypeError, ValueError):  # the latter for half of a surrogate pair
        bad = True
    else:
        bad = "\0" in str(given)
    if bad:
        raise ContractError(f"{call}: {given!r:.200} is not a path; pass the path of a directory")
    return Path(given)


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """The content of a file.

    Args:
        path: The file.
        most: Its largest size in bytes; None for any.

    Raises:
        OSError: It cannot be read, is not a file, or is larger.
    """
    with open_file(path) as file:
        if most is not None and os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"larger than {most} bytes", str(path))
        return file.read()


def _open_file(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a pipe waits for its writer; on files it has no effect (open(2)).
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(21, "Is a directory", path)
    raise OSError(22, "not a file but a pipe, a socket or a device", path)


# -- Flushes files and directories to disk ---------------------------------------------------------


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- Paths that a file names, such as an index or a manifest: they stay within the folder of that file --


class OutsideFolderError(ValueError):
    """A name leads out of its folder."""


def file_inside(folder: Path, name: str) -> Path:
    """The path of a file in a folder.

    It may be a link within the folder, or one of the Hugging Face cache to its blobs.

    Args:
        folder: The folder; may be a link itself.
        name: Relative to it, from a file that is not trusted.

    Raises:
        OutsideFolderError: It lies outside the folder; says how.
    """
    if leaves(name):
        raise OutsideFolderError(f"{name!r:.200} lies outside the folder")
    path = folder / name
    try:
        home, found = folder.resolve(), path.resolve()
    except (OSError, RuntimeError):  # links in a circle; opening it says so
        return path
    blobs = [
        home.parents[depth].parent / "blobs"
        for depth in range(len(home.parents))
        if home.parents[depth].name == "snapshots"
    ]
    if not any(found.is_relative_to(root) for root in (home, *blobs)):
        raise OutsideFolderError(f"{name!r:.200} is a link to {found}, outside the folder")
    return path


def leaves(name: str) -> bool:
    """Whether a name leads out of the folder that it is relative to, or cannot be a path."""
    path = PurePath(name)
    return not name or "\0" in name or path.is_absolute() or ".." in path.parts
