"""The sockets between the ranks and the monitor on rank 0."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

from unishard.errors import ConfigError, Problem

_CONNECT = 5.0
"""Seconds to try an address of the monitor."""
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""At most: seconds until the first probe and between two, and how many go unanswered."""


def listen(backlog: int, *, local: bool) -> socket.socket:
    """A server for this machine only, or for all: of IPv6 and IPv4, of IPv4 where the system has IPv6 switched off."""
    if local:
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def keep_alive(connection: socket.socket) -> None:
    """Let a connection end within a minute after its other host is gone, which closes nothing; the system's own limit
    is two hours.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = []
    for name, most in _KEEPALIVE.items():
        option = getattr(socket, name, None)
        if option is None:  # another system than Linux
            return
        if connection.getsockopt(socket.IPPROTO_TCP, option) > most:
            connection.setsockopt(socket.IPPROTO_TCP, option, most)
        limits.append(connection.getsockopt(socket.IPPROTO_TCP, option))
    idle, interval, count = limits
    # Probes are only sent while no data is on its way; this limits both.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (idle + interval * count))


def own_address() -> str:
    """An address of this machine."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "localhost"


def connect(host: str, port: int, hello: dict[str, Any]) -> socket.socket | None:
    """A connection to the monitor, if it answers there.

    Raises:
        ConfigError: It refuses this process.
    """
    answer = b""
    try:
        with contextlib.ExitStack() as unanswered:
            connection = unanswered.enter_context(socket.create_connection((host, port), _CONNECT))
            keep_alive(connection)
            connection.sendall(json.dumps(hello).encode() + b"\n")
            while not answer.endswith(b"\n"):  # what follows is for the thread
                if not (data := connection.recv(1)):
                    return None
                answer += data
            unanswered.pop_all()
    except OSError:
        return None
    if why := json.loads(answer).get("text"):
        connection.close()
        raise ConfigError([Problem("", why)])
    connection.settimeout(None)
    return connection
