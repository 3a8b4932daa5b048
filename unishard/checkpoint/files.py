"""Opens files of a checkpoint: a pipe or a device in place of one would make a reader wait, or read, forever."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

from unishard.config.paths import expanded
from unishard.errors import ContractError


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading.

    Raises:
        OSError: It cannot be opened, or is not a file.
    """
    return open(path, "rb", opener=_open_file)


def path_of(path: str | Path, call: str) -> Path:
    """The path that a caller has given, with `~` expanded.

    Args:
        path: The path.
        call: The method that it was given to.

    Raises:
        ContractError: No file can have this name, or it is a URL or contains an environment variable.
    """
    try:
        os.fsencode(path)
    except (TypeError, ValueError):  # the latter for half of a surrogate pair
        bad = True
    else:
        bad = not path or "\0" in str(path)
    if bad:
        raise ContractError(f"{call}: {path!r:.200} is not a path; pass the path of a directory")
    try:
        place = Path(expanded(path))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            place.lstat()
    except ValueError as error:
        raise ContractError(f"{call}: {str(path)!r} {error}") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ContractError(f"{call}: {str(path)!r:.200} is too long for the file system; shorten it") from None
    return place


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
