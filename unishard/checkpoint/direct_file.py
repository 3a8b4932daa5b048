"""A file written once, sequentially, that bypasses the page cache (O_DIRECT) where the file system supports it.

A checkpoint is rarely read soon after it was saved. In the page cache it would take new pages for every byte, until the
kernel stalls the process to write them out. Instead, a few buffers go straight to disk: one is being written while the
others are filled. Another thread computes the checksum meanwhile, which takes longer than all other computations on a
tensor.
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
