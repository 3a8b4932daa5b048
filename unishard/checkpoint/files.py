"""Opens files of a checkpoint: a pipe or a device in place of one would make a reader wait, or read, forever."""

from __future__ import annotations

import errno
import io
import mmap
import os
import stat
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path, PurePath
from types import TracebackType

from unishard.config.paths import expanded
from unishard.errors import ContractError


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading.

    Raises:
        OSError: It cannot be opened, or is not a file.
    """
    return open(path, "rb", opener=_open_file)


def path_of(given: str | Path, call: str) -> Path:
    """The path that a caller has given, with `~` expanded.

    Args:
        given: The path.
        call: The method that it was given to.

    Raises:
        ContractError: No file can have this name, or it is a URL or contains an environment variable.
    """
    try:
        os.fsencode(given)
    except (TypeError, ValueError):  # the latter for half of a surrogate pair
        bad = True
    else:
        bad = "\0" in str(given)
    if bad:
        raise ContractError(f"{call}: {given!r:.200} is not a path; pass the path of a directory")
    try:
        return Path(expanded(given))
    except ValueError as error:
        raise ContractError(f"{call}: {str(given)!r} {error}") from None


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


# --------------------------------------------------------------------------------------------------
# A file written once, sequentially, that bypasses the page cache (O_DIRECT) where the file system supports it.
#
# A checkpoint is rarely read soon after it was saved. In the page cache it would take new pages for every byte, until
# the kernel stalls the process to write them out. Instead, a few buffers go straight to disk: one is being written
# while the others are filled. Another thread computes the checksum meanwhile, which takes longer than all else that is
# computed of a tensor.

BUFFER = 1 << 22
"""Bytes per write; much larger writes are slower on Linux."""

_BUFFERS = 3
_ALIGNED = 1 << 12
"""O_DIRECT requires memory address, length and file offset to be multiples of this: open(2)."""


_DIRECT: int = getattr(os, "O_DIRECT", 0)
"""Not available on every system; without it, writes go through the page cache."""


class DirectFile:
    """A context manager; when its block ends without an error, everything written is on disk.

    Attributes:
        size: Bytes written so far.
        crc: CRC-32 of these bytes, once the block has ended.
    """

    def __init__(self, path: Path) -> None:
        self.size = self.crc = 0
        self._file = _open(path)
        # `mmap` allocates shared memory, so a concurrent fork, such as a data loader's, does not disturb a write
        # (open(2), O_DIRECT).
        self._buffers = [memoryview(mmap.mmap(-1, BUFFER)) for _ in range(_BUFFERS)]
        self._filled = 0
        self._thread, self._summing = (
            ThreadPoolExecutor(1, "unishard-output"),
            ThreadPoolExecutor(1, "unishard-checksum"),
        )
        self._under_way: deque[list[Future[None]]] = deque()

    def write(self, piece: bytes | memoryview) -> None:
        """Append data of any length.

        Raises:
            OSError: This data, or data of an earlier call, could not be written.
        """
        self.size += len(piece)
        rest = memoryview(piece)
        while rest:
            taken = rest[: BUFFER - self._filled]
            self._buffers[0][self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            rest = rest[len(taken) :]
            if self._filled == BUFFER:
                self._hand_over(BUFFER)

    def _hand_over(self, length: int) -> None:
        """Submit the first buffer for writing, and continue with a free one."""
        full = self._buffers.pop(0)
        self._buffers.append(full)
        filled, self._filled = self._filled, 0
        try:
            self._under_way.append([])
            self._under_way[-1].append(self._summing.submit(self._sum, full[:filled]))
            self._under_way[-1].append(self._thread.submit(self._put, full[:length]))
        except RuntimeError:  # the interpreter is shutting down during a save: Python starts no more threads
            summed = bool(self._under_way[-1])
            self._settle(0)
            if not summed:
                self._sum(full[:filled])
            self._put(full[:length])
        self._settle(_BUFFERS - 1)

    def _settle(self, left: int) -> None:
        while len(self._under_way) > left:
            for done in self._under_way.popleft():
                done.result()

    def _sum(self, piece: memoryview) -> None:
        """Continue the checksum. One thread does so, in the order of the buffers."""
        self.crc = zlib.crc32(piece, self.crc)

    def _put(self, rest: memoryview) -> None:
        """Write all of it; a disk that fills up may accept only some."""
        while rest:
            try:
                rest = rest[self._file.write(rest) or 0 :]
            except OSError as error:
                if error.errno != errno.EINVAL or not _disable_direct_io(self._file):
                    raise

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file, self._thread, self._summing:
            if error is None:
                self._finish()

    def _finish(self) -> None:
        if self._filled:
            self._hand_over(-(-self._filled // _ALIGNED) * _ALIGNED)
        self._settle(0)
        self._file.truncate(self.size)
        os.fsync(self._file.fileno())


def _open(path: Path) -> io.FileIO:
    try:
        return io.open(path, "wb", buffering=0, opener=_open_direct)  # noqa: UP020 - what pathlib calls too, which takes no opener
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return io.open(path, "wb", buffering=0)  # noqa: UP020


def _open_direct(path: str, flags: int) -> int:
    return os.open(path, flags | _DIRECT, 0o666)


def _disable_direct_io(file: io.FileIO) -> bool:
    """Switch to cached writes, for a file system that accepts O_DIRECT in open but not in write; False if they are
    cached already.
    """
    if not _DIRECT:
        return False
    import fcntl  # available wherever O_DIRECT is

    flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
    if not flags & _DIRECT:
        return False
    fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags & ~_DIRECT)
    return True
