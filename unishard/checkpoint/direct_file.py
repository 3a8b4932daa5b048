"""A file that is written once, from its beginning to its end, past the kernel's cache of files wherever the file system lets it.

Nobody reads a checkpoint soon after it was saved. Kept in the cache it takes fresh pages of memory for every byte, and waits there until
the kernel stops the process for the disk. So it goes to the disk from a few buffers, of which one is being written while others are filled.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

__all__ = ["BUFFER", "DirectFile"]

BUFFER = 1 << 22
"""Bytes that are written at once: Linux takes much larger ones more slowly."""

_BUFFERS = 3
_ALIGNED = 1 << 12
"""What is written past the cache is a multiple of it in memory, in length and in its place in the file: open(2), O_DIRECT."""


_DIRECT: int = getattr(os, "O_DIRECT", 0)
"""Not there on every system; without it files take the usual way."""


class DirectFile:
    """What has been written is on the disk when the block ends without an error.

    Attributes:
        size: Bytes that have been written.
        crc: Their CRC-32.
    """

    def __init__(self, path: Path) -> None:
        self.size = self.crc = 0
        self._file = _open(path)
        # Shared memory, as `mmap` makes it: a fork meanwhile, such as that of a loader, does not disturb a write then (open(2), O_DIRECT).
        self._buffers = [memoryview(mmap.mmap(-1, BUFFER)) for _ in range(_BUFFERS)]
        self._filled = 0
        self._thread = ThreadPoolExecutor(1, "unishard-output")
        self._under_way: deque[Future[None]] = deque()

    def write(self, piece: bytes | memoryview) -> None:
        """Take all of it, of any length.

        Raises:
            OSError: What was taken before, or this, could not be written.
        """
        self.crc = zlib.crc32(piece, self.crc)
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
        """Have the first buffer written, and go on with one that has been."""
        full = self._buffers.pop(0)
        self._buffers.append(full)
        self._filled = 0
        try:
            self._under_way.append(self._thread.submit(self._put, full[:length]))
        except RuntimeError:  # a script that ends while a save is under way: Python starts no more threads
            self._settle(0)
            self._put(full[:length])
        self._settle(_BUFFERS - 1)

    def _settle(self, left: int) -> None:
        while len(self._under_way) > left:
            self._under_way.popleft().result()

    def _put(self, rest: memoryview) -> None:
        """All of it: a disk that fills up may take a part."""
        while rest:
            try:
                rest = rest[self._file.write(rest) or 0 :]
            except OSError as error:
                if error.errno != errno.EINVAL or not _through_the_cache(self._file):
                    raise

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._file, self._thread:
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
        return io.open(path, "wb", buffering=0, opener=_directly)  # noqa: UP020 - what pathlib calls too, which takes no opener
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return io.open(path, "wb", buffering=0)  # noqa: UP020


def _directly(path: str, flags: int) -> int:
    return os.open(path, flags | _DIRECT, 0o666)


def _through_the_cache(file: io.FileIO) -> bool:
    """From here on let the kernel keep it as usual, for a file system that opens a file and then does not write; False if it does so."""
    if not _DIRECT:
        return False
    import fcntl  # where there is O_DIRECT, there is this

    flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
    if not flags & _DIRECT:
        return False
    fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags & ~_DIRECT)
    return True
