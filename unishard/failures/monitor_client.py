"""The connection of each rank to the monitor on rank 0. A rank learns from it within milliseconds that another rank has
ended, and why.

The first call that needs the other ranks opens it, before the process group starts. The system closes it for a process
that is killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unishard.errors import ConfigError
from unishard.failures import process_state
from unishard.failures.connections import connect, own_address
from unishard.failures.deadlocks import DeadlockDetector
from unishard.failures.heartbeat import SILENT, HeartbeatTimeout
from unishard.failures.monitor_server import DIED, ENDED, FOLLOWED, RAISED, MonitorServer
from unishard.failures.rank_ending import Ending

_POLL = 0.25
"""Seconds between two looks at a main thread that may be stuck."""
_ASK = 1.0
"""Seconds between two checks that rank 0 still answers, while this rank waits in C++."""

_WEIGHTS = {RAISED: 0, DIED: 0, SILENT: 0, FOLLOWED: 1, ENDED: 1}
"""Which endings explain others."""

_logger = logging.getLogger("unishard")
_current: MonitorClient | None = None
_opened = 0
"""Connections that this process has opened: each has keys of its own in the store."""


class MonitorClient:
    """One rank's connection. Any thread may use it."""

    def __init__(
        self, connection: socket.socket, rank: int, size: int, server: MonitorServer | None, server_process: Any = None
    ) -> None:
        """Start the thread that listens.

        Args:
            connection: To the monitor, which knows this rank.
            rank: This rank.
            size: Number of ranks.
            server: The monitor, in its own process.
            server_process: That process, see `process_state`.
        """
        self.rank, self.size = rank, size
        self.port: int = connection.getpeername()[1]
        """Of the monitor."""
        self.thread = threading.get_ident()
        """The thread that trains."""
        self.endings: dict[int, Ending] = {}
        """Of all ranks that have ended, the first one first; the same order on every rank."""
        self.abort_reason = ""
        """Why no rank can go on, although all live; empty while they can."""
        self.place: Callable[[], str] = lambda: ""
        """Where this rank is, as `is in engine.forward (update 3)`; empty if unknown."""
        self.when_doomed: Callable[[], None] = lambda: None
        """Called a few times a second once another rank has ended, or no rank can go on."""
        self._socket, self._server, self._server_process = connection, server, server_process
        self._heartbeat = HeartbeatTimeout()
        self._collected: dict[str, list[Any] | None] = {}
        """The values of all ranks by key, for the keys that this rank waits for; None until they come. The monitor
        answers again if a rank asks later."""
        self._blocked = False
        self._printed: set[int] = set()
        self._gone: set[int] = set()
        self._closed = False
        self._news = threading.Condition()
        self._sending = threading.Lock()
        threading.Thread(target=self._listen, name="unishard-monitor-client", daemon=True).start()
        os.register_at_fork(after_in_child=self._close_in_child)

    # -- what a rank says --------------------------------------------------------------------------

    def collect(
        self, key: str, value: Any, *, purpose: str = "", seconds: float | None = None, patience: float | None = None
    ) -> dict[int, Any]:
        """Give a value and get those of all ranks, as JSON. Collective; can be interrupted.

        Args:
            key: Used once.
            value: This rank's.
            purpose: What is waited for, as in `has waited 10 s for rank 1 to call unishard.prepare`.
            seconds: After this time, what is there is returned; None to wait.
            patience: Seconds until a warning names the ranks that are waited for; None for no warning.

        Returns:
            By rank; without the ranks that have ended before, and those that are too late.
        """
        with self._news:
            self._collected[key] = None
        self.give(key, value, purpose=purpose, seconds=seconds, patience=patience)
        self._heartbeat.rest()
        end = None if seconds is None else time.monotonic() + seconds + 1
        with self._news:
            try:
                while (grouped := self._collected[key]) is None:
                    if self._closed or 0 in self._gone or (end is not None and time.monotonic() >= end):
                        return {self.rank: value}  # the monitor is gone
                    self._news.wait(0.5)
                    self.ask()
            finally:
                del self._collected[key]
        return {rank: value for value, spans in grouped for first, last in spans for rank in range(first, last + 1)}

    def give(
        self, key: str, value: Any, *, purpose: str = "", seconds: float | None = None, patience: float | None = None
    ) -> None:
        """Give a value without waiting for those of the others; the arguments are those of `collect`."""
        self._send(
            {
                "kind": "collect",
                "key": key,
                "value": value,
                "purpose": purpose,
                "seconds": seconds,
                "patience": patience,
            }
        )

    def status(self, status: Any) -> None:
        """Tell the monitor where this rank stands still; None once it moves."""
        self._send({"kind": "status", "status": status})
        if status is None:
            self._heartbeat.rest()

    @contextlib.contextmanager
    def blocking_call(self) -> Iterator[None]:
        """A block in which this rank may wait for others in C++ before the watchdog sees it. A rank that does not
        answer is named.
        """
        self._heartbeat.rest()
        self._blocked = True
        self._send({"kind": "blocked", "blocked": True})
        try:
            yield
        finally:
            self._blocked = False
            self._send({"kind": "blocked", "blocked": False})

    def be_patient(self, seconds: float) -> None:
        """Set `communication.desync_timeout`, which limits how long a rank may not answer."""
        for silence in (self._heartbeat, *([self._server.heartbeat] if self._server is not None else [])):
            silence.patience = seconds

    def ask(self) -> None:
        """Ask whether rank 0's process still runs. Called about once a second while this rank waits."""
        if self.rank == 0 or self._closed or 0 in self._gone:
            return
        ask, silent = self._heartbeat.look((0,))
        if ask:
            self._send({"kind": "ping"})
        if silent and self._heartbeat.has_ended(0, self._server_process):
            # What rank 0 reads first if it runs again.
            self._send({"kind": "ended", "text": f"has ended, since rank 0 {self._heartbeat.text}", "how": RAISED})
            with self._news:
                self.endings.setdefault(0, Ending(0, self._heartbeat.text, SILENT))
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # ends the wait of `_listen`

    def end(self, text: str, how: str) -> None:
        """Tell all ranks that this one ends, and why. Only the first time counts."""
        if self.rank in self.endings:
            return
        self._send({"kind": "ended", "text": text, "how": how})
        if not self.wait(lambda: self.rank in self.endings, 2.0):
            self.endings[self.rank] = Ending(self.rank, text, how)

    def printed(self) -> None:
        """Tell all ranks that this one has written its error."""
        self._send({"kind": "printed"})

    # -- what it has heard -------------------------------------------------------------------------

    @property
    def doomed(self) -> bool:
        """Whether the run cannot go on: another rank has ended, or no rank can go on."""
        return bool(self.abort_reason) or any(rank != self.rank for rank in list(self.endings))

    def others(self) -> list[Ending]:
        """The other ranks that have ended, the first one first."""
        return [ending for ending in list(self.endings.values()) if ending.rank != self.rank]

    def first(self, seconds: float = 0.0) -> Ending | None:
        """The ending of another rank that explains why this one cannot go on. An error of its own, or its death, comes
        before all others.

        Args:
            seconds: How long to wait for news.
        """
        self.wait(lambda: any(_WEIGHTS[ending.how] == 0 for ending in self.others()), seconds)
        # Where this one was silent, the others have ended without it.
        silent = [ending for ending in list(self.endings.values()) if (ending.rank, ending.how) == (self.rank, SILENT)]
        return min(silent or self.others(), key=lambda ending: _WEIGHTS[ending.how], default=None)

    def cause(self, seconds: float = 0.0) -> str:
        """Why the run cannot go on: `abort_reason`, or the ending of another rank; empty if unknown.

        Args:
            seconds: How long to wait for news.
        """
        self.wait(lambda: self.doomed, seconds)
        return self.abort_reason or str(self.first() or "")

    def has_printed(self, rank: int) -> bool:
        """Whether a rank has written its error, or is gone."""
        return rank in self._printed or rank in self._gone

    def is_gone(self, rank: int) -> bool:
        """Whether a rank's process has ended."""
        return rank in self._gone

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until a message makes a condition true."""
        with self._news:
            return self._news.wait_for(lambda: condition() or self._closed, seconds) and condition()

    # -- the connection ----------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending, contextlib.suppress(OSError):  # the monitor is gone
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        buffer, poll = b"", select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            if not poll.poll(1000 * (_POLL if self.doomed else _ASK)):
                if self.doomed:
                    self.when_doomed()
                elif self._blocked:
                    self.ask()
                continue
            try:
                data = self._socket.recv(65536)
            except OSError:
                data = b""
            if not data:
                break
            self._heartbeat.heard(0)
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                self._hear(json.loads(line))
        with self._news:
            self._gone.add(0)
            self.endings.setdefault(0, Ending(0, "", DIED))
            self._news.notify_all()
        while not self._closed:
            time.sleep(_POLL)
            self.when_doomed()

    def _hear(self, message: dict[str, Any]) -> None:
        with self._news:
            match message["kind"]:
                case "collected" if message["key"] in self._collected:
                    self._collected[message["key"]] = message["values"]
                case "ended":
                    self.endings[message["rank"]] = Ending(message["rank"], message["text"], message["how"])
                case "gone":
                    self._gone.add(message["rank"])
                case "printed":
                    self._printed.add(message["rank"])
                case "abort":
                    self.abort_reason = message["text"]
            self._news.notify_all()
        if message["kind"] == "ping":
            self._send({"kind": "pong"})
        if message["kind"] == "late":
            _logger.warning("rank %d %s", self.rank, message["text"])

    def close(self) -> None:
        """Close the connection. The other ranks learn that this one has ended."""
        self.end("has ended its program, or left it with sys.exit", ENDED)
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _close_in_child(self) -> None:
        self._closed = True
        self._socket.close()
        if self._server is not None:
            self._server.close_in_child()


def has_been_open() -> bool:
    """Whether this process has ever opened a connection."""
    return _opened > 0


def is_served(store: Any, seconds: float) -> bool:
    """Wait until the monitor on rank 0 accepts the next connections of a run; can be interrupted.

    Args:
        store: As in `open_client`.
        seconds: How long to wait.

    Raises:
        DistNetworkError: The store is gone.
    """
    keys = dist.PrefixStore(f"unishard/monitor/{_opened + 1}", store)  # type: ignore[attr-defined]  # torch 2.13 exports it without __all__
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            keys.wait(["monitor"], timedelta(seconds=min(_ASK, seconds)))
        except dist.DistNetworkError:
            raise
        except RuntimeError:  # the time is over, which each kind of store says in another class
            time.sleep(_POLL)
            continue
        return True
    return False


def current() -> MonitorClient | None:
    """The connection of this process; None with one rank, or where the monitor cannot be reached."""
    return _current


def blocking_call() -> AbstractContextManager[None]:
    """A block in which this rank may wait for others in C++; see `MonitorClient.blocking_call`."""
    return contextlib.nullcontext() if _current is None else _current.blocking_call()


def open_client(store: Any, rank: int, size: int, hosts: Sequence[str], *, local: bool = False) -> MonitorClient | None:
    """Connect this process to the monitor. Collective: waits for rank 0, see `is_served`.

    Args:
        store: A `torch.distributed.Store` that all ranks share.
        rank: This rank.
        size: Number of ranks.
        hosts: Names or addresses of rank 0's machine to try first.
        local: Whether all ranks are on one machine; no other one can then connect.

    Raises:
        ConfigError: Another process is this rank, or rank 0 has another number of ranks.
    """
    global _current, _opened
    _opened += 1
    keys = dist.PrefixStore(f"unishard/monitor/{_opened}", store)  # type: ignore[attr-defined]  # torch 2.13 exports it without __all__
    server = None
    if rank == 0:
        token = secrets.token_hex(16)
        asked = dist.PrefixStore(f"unishard/monitor/{_opened}", store.clone())  # type: ignore[attr-defined]  # a waiting request blocks others
        server = MonitorServer(
            size, token, DeadlockDetector(size), lambda other: bool(asked.check([f"without/{other}"])), local=local
        )
        keys.set("monitor", json.dumps([socket.gethostname(), own_address(), server.port, token, process_state.own()]))
    machine, address, port, token, server_process = json.loads(keys.get("monitor"))
    hello = {"token": token, "rank": rank, "size": size, "process": process_state.own()}
    for host in [*(["127.0.0.1"] if machine == socket.gethostname() else []), *hosts, address]:
        try:
            connection = connect(host, port, hello)
        except ConfigError:
            _opened -= 1  # this process is none of the ranks, and its error is written as that of one which never came
            raise
        if connection is not None:
            _current = MonitorClient(connection, rank, size, server, server_process)
            return _current
    keys.set(f"without/{rank}", "")
    _logger.warning(
        "rank %d cannot connect to rank 0 (%s, port %d), so the end of a rank is noticed late; let ranks connect to "
        "each other's ports",
        rank,
        ", ".join([*hosts, address]),
        port,
    )
    _current = None
    return None


def forget() -> None:
    """Note that the connection of this process is closed."""
    global _current
    _current = None
