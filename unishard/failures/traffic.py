"""Whether data between this process and others is on its way. Ranks that wait for each other in vain send nothing; a
transfer moves data, however slow the network is.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

_DESCRIPTORS = "/proc/self/fd"
_ESTABLISHED = 1
_MOVED = 16384
"""Bytes of a connection between two looks; less may be a heartbeat or a log."""
_STEP = 2.0
"""Seconds that count between two looks, at most: more have passed only if this process itself was stopped."""


class _Connection(NamedTuple):
    """What the system says of a TCP connection."""

    moved: int
    """Bytes received, and bytes that the other side has acknowledged."""
    unsent: bool
    """Whether the other side has not acknowledged all that was sent."""


class Traffic:
    """Looks at this process's TCP connections, the only way of gloo."""

    def __init__(self, port: int) -> None:
        """Look for the first time.

        Args:
            port: Of the monitor, whose messages do not count.
        """
        self._port = port
        self._told = False
        """Whether the system counts bytes: those that came from the monitor."""
        self._quiet, self._looked = 0.0, time.monotonic()
        self._before = self._connections()

    def look(self) -> float:
        """Seconds for which nothing has been on its way at any look; 0 where the system does not tell."""
        now, before, self._before = time.monotonic(), self._before, self._connections()
        self._quiet += min(now - self._looked, _STEP)
        self._looked = now
        old = ((before.get(number, connection), connection) for number, connection in self._before.items())
        if not self._told or any((was.unsent and is_.unsent) or is_.moved - was.moved >= _MOVED for was, is_ in old):
            self._quiet = 0.0
        return self._quiet

    def _connections(self) -> dict[int, _Connection]:
        """By inode."""
        found = {}
        for number, own in _sockets():
            with suppress(OSError, struct.error):  # none of TCP, or an old system
                info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                # struct tcp_info of linux/tcp.h
                (unacknowledged,), (unsent,) = struct.unpack_from("=I", info, 24), struct.unpack_from("=I", info, 144)
                sent, received = struct.unpack_from("=QQ", info, 120)
                if self._port in (own.getsockname()[1], own.getpeername()[1]):
                    self._told |= received > 0
                elif info[0] == _ESTABLISHED:
                    found[number] = _Connection(sent + received, unacknowledged + unsent > 0)
        return found


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Inodes of the open sockets, and objects that leave them as they are; none on another system than Linux."""
    for name in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        with suppress(OSError):  # closed by another thread
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                own = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=int(name))
                try:
                    yield status.st_ino, own
                finally:
                    own.detach()
