"""The monitor on rank 0: a thread to which every rank keeps a connection, so that all ranks learn within milliseconds
that a process has ended.

It passes on why ranks end, and collects a value from every rank. It sends nothing in a healthy run. Messages are lines
of JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from unishard.failures.connections import keep_alive, listen
from unishard.failures.deadlocks import Diagnosis
from unishard.failures.heartbeat import SILENT, HeartbeatTimeout

DIED, RAISED, FOLLOWED, ENDED = "died", "raised", "followed", "ended"
"""How a rank's process has ended: without a message, with an error, with an error that another rank has caused, or
without an error."""
_TICK = 0.5
"""Seconds between two checks of what ranks wait for."""
_STOPPED = 5.0
"""Seconds to wait for a rank that reads nothing because its process is stopped."""
_REMEMBERED = 32
"""Complete collections that a late rank can still ask for."""
_LONGEST = 16 * 2**20
"""Bytes of a message; a longer one does not come from a rank."""
_HELLO = 4096
"""Bytes of the first message, before the monitor knows that it comes from a rank."""

_logger = logging.getLogger("unishard")


def _line_of(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


DetectDeadlock = Callable[[Mapping[int, tuple[float, Any]]], Diagnosis]


class _Link:
    """A connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.rank = -1
        self.process: Any = None
        """See `process_state`."""
        self.buffer = b""


class _Collection:
    """Values of all ranks under one key."""

    def __init__(self, purpose: str, missing: set[int]) -> None:
        self.purpose = purpose
        self.missing = missing
        """The ranks that live and have given nothing."""
        self.began = time.monotonic()
        self.deadline: float | None = None
        """When it counts as complete even if ranks are missing."""
        self.patience: float | None = None
        """Seconds until a warning names the ranks that are missing."""
        self.values: dict[int, Any] = {}
        self.answer = b""
        """What all ranks get once it is complete, when `values` are forgotten."""

    @property
    def complete(self) -> bool:
        """Whether no rank is waited for any more."""
        return bool(self.answer)

    def finish(self, key: str) -> None:
        """Put the values into one line for any number of ranks: equal ones once, each with the first and last of the
        ranks that gave it.
        """
        grouped: dict[str, tuple[Any, list[list[int]]]] = {}
        for rank, value in sorted(self.values.items()):
            spans = grouped.setdefault(json.dumps(value), (value, []))[1]
            if spans and spans[-1][1] == rank - 1:
                spans[-1][1] = rank
            else:
                spans.append([rank, rank])
        self.answer = _line_of({"kind": "collected", "key": key, "values": list(grouped.values())})
        self.values.clear()


class MonitorServer:
    """Serves the connections of all ranks in a thread of its own."""

    def __init__(
        self, size: int, token: str, detect: DetectDeadlock, unreachable: Callable[[int], bool], *, local: bool = False
    ) -> None:
        """Start the thread.

        Args:
            size: Number of ranks.
            token: What a rank must say first; others are refused.
            detect: Called with the ages and statuses of all ranks that live when each of them stands still.
            unreachable: Whether a rank has said elsewhere that it cannot connect.
            local: Whether all ranks are on this machine, so that no other one needs to connect.
        """
        self._size, self._token, self._detect, self._unreachable = size, token, detect, unreachable
        self._listener = listen(size, local=local)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._links: dict[int, _Link] = {}
        self._ended: set[int] = set()
        self._endings: list[dict[str, Any]] = []
        """Their last messages, and why no rank can go on, for ranks that connect later."""
        self._collections: dict[str, _Collection] = {}
        self._statuses: dict[int, tuple[float, Any]] = {}
        """Of the ranks that live and stand still, with the time at which each came."""
        self._blocked: set[int] = set()
        """Ranks that may wait for others in C++, and send nothing meanwhile."""
        self._aborted = False
        self._considered = -_TICK
        self._asked = False
        """Whether statuses have come since they were considered."""
        self.heartbeat = HeartbeatTimeout()
        threading.Thread(target=self._serve, name="unishard-monitor", daemon=True).start()

    def close_in_child(self) -> None:
        """Close a forked process's copies of the sockets, which would keep the connections open after the end of this
        process.
        """
        for link in self._links.values():
            link.socket.close()
        self._listener.close()

    def _serve(self) -> None:
        while self._links or not self._ended:
            for key, _ in self._selector.select(_TICK if (self._asked or self._somebody_waits()) else None):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._receive(key.data)
            self._look()
        self._listener.close()

    def _somebody_waits(self) -> bool:
        standing = self._statuses.keys() | self._blocked
        return any(not collection.complete for collection in self._collections.values()) or not standing.isdisjoint(
            self._links
        )

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # closed again, or this process has as many files open as it may
            _logger.warning("a rank could not connect to rank 0 (%s)", error.strerror)
            time.sleep(_TICK)
            return
        keep_alive(connection)
        connection.settimeout(_STOPPED)
        self._selector.register(connection, selectors.EVENT_READ, _Link(connection))

    def _receive(self, link: _Link) -> None:
        try:
            data = link.socket.recv(65536)
        except OSError:
            data = b""
        *lines, link.buffer = (link.buffer + data).split(b"\n")
        self.heartbeat.heard(link.rank)
        for line in lines:
            try:
                self._handle(link, json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # not from a rank
                data = b""
                break
        if not data or len(link.buffer) > (_HELLO if link.rank < 0 else _LONGEST):
            self._drop(link)

    def _drop(self, link: _Link) -> None:
        self._selector.unregister(link.socket)
        link.socket.close()
        if link.rank >= 0:
            del self._links[link.rank]
            self._end(link.rank, "", DIED)

    def _handle(self, link: _Link, message: dict[str, Any]) -> None:
        if link.rank < 0:
            rank = message["rank"]
            known = secrets.compare_digest(message["token"].encode(), self._token.encode())
            if not known or type(rank) is not int or not 0 <= rank < message["size"]:
                raise ValueError("a stranger")
            if wrong := self._misplaced(rank, message["size"]):
                self._send(link, {"kind": "refused", "text": wrong})
                if len(self._links.keys() | self._ended) < self._size:  # else the run goes on without that process
                    self._give_up(wrong)
                raise ValueError(wrong)
            link.rank, link.process = rank, message.get("process")
            self._links[link.rank] = link
            for message in ({"kind": "welcome"}, *self._endings):
                self._send(link, message)
            return
        match message["kind"]:
            case "collect":
                self._collect(link, message)
            case "status":
                if message["status"] is None or link.rank in self._ended:
                    self._statuses.pop(link.rank, None)
                else:
                    self._statuses[link.rank] = time.monotonic(), message["status"]
                self._asked = True
                self._consider()
            case "ended":
                self._end(link.rank, message["text"], message["how"])
            case "blocked":
                (self._blocked.add if message["blocked"] else self._blocked.discard)(link.rank)
            case "printed":
                self._cast(_line_of({"kind": "printed", "rank": link.rank}))
            case "ping":
                self._send(link, {"kind": "pong"})

    def _misplaced(self, rank: int, size: int) -> str:
        """Why a process cannot be the rank that it was started as; empty if it can."""
        if size != self._size:
            return (
                f"rank {rank} was started as one of {size} ranks, and rank 0 as one of {self._size}; set the same "
                "WORLD_SIZE for every process"
            )
        if rank in self._links:
            return f"two processes were started as rank {rank}; set another RANK for each, from 0 to {size - 1}"
        return ""

    def _give_up(self, why: str) -> None:
        """Tell all ranks, also those that connect later, that none can go on."""
        self._aborted = True
        self._endings.append({"kind": "abort", "text": why})
        self._cast(_line_of(self._endings[-1]))
        for key in list(self._collections):
            self._finish(key)

    def _end(self, rank: int, text: str, how: str) -> None:
        messages = [{"kind": "gone", "rank": rank}] if how in (DIED, SILENT) else []
        if rank not in self._ended:
            self._ended.add(rank)
            self._blocked.discard(rank)
            messages.insert(0, {"kind": "ended", "rank": rank, "text": text, "how": how})
            self._statuses.pop(rank, None)
        for message in messages:
            self._endings.append(message)
            self._cast(_line_of(message))
        for key, collection in list(self._collections.items()):
            collection.missing.discard(rank)
            self._finish(key)

    def _cast(self, line: bytes) -> None:
        for rank in sorted(self._links, reverse=True):  # this process last: it may end as soon as it hears
            self._write(self._links[rank], line)

    def _send(self, link: _Link, message: dict[str, Any]) -> None:
        self._write(link, _line_of(message))

    def _write(self, link: _Link, line: bytes) -> None:
        with contextlib.suppress(OSError):  # its end is noticed when it is read
            link.socket.sendall(line)

    # -- collections -------------------------------------------------------------------------------

    def _collect(self, link: _Link, message: dict[str, Any]) -> None:
        key = message["key"]
        if key not in self._collections:
            complete = [known for known, collection in self._collections.items() if collection.complete]
            for old in complete[: max(0, len(complete) - _REMEMBERED)]:
                del self._collections[old]
            self._collections[key] = _Collection(message["purpose"], set(range(self._size)) - self._ended)
        collection = self._collections[key]
        if collection.complete:
            self._write(link, collection.answer)
            return
        collection.values[link.rank] = message["value"]
        collection.missing.discard(link.rank)
        if collection.deadline is None and message["seconds"] is not None:
            collection.deadline = time.monotonic() + message["seconds"]
        if collection.patience is None and message["patience"] is not None:
            collection.began, collection.patience = time.monotonic(), message["patience"]
        self._finish(key)

    def _finish(self, key: str, *, late: bool = False) -> None:
        collection = self._collections[key]
        if collection.complete or (collection.missing and not (late or self._aborted)):
            return
        collection.finish(key)
        self._cast(collection.answer)

    def _look(self) -> None:
        """Complete collections whose time is over, and warn of ranks that are waited for."""
        self._consider()
        now = time.monotonic()
        for key, collection in list(self._collections.items()):
            if collection.complete:
                continue
            if collection.deadline is not None and now >= collection.deadline:
                self._finish(key, late=True)
            elif collection.patience is not None and now >= collection.began + collection.patience:
                self._warn(collection, collection.patience)
                collection.patience = None
                self._finish(key)

        self._ask()

    def _ask(self) -> None:
        """While ranks wait, ask whether the processes of the others still run."""
        if not self._somebody_waits():
            self.heartbeat.rest()
            return
        others = [rank for rank in self._links if rank and rank not in self._ended]
        ask, silent = self.heartbeat.look(others)
        for rank in others if ask else ():
            self._send(self._links[rank], {"kind": "ping"})
        for rank in silent:
            if self.heartbeat.has_ended(rank, self._links[rank].process):
                self._end(rank, self.heartbeat.text, SILENT)

    def _warn(self, collection: _Collection, seconds: float) -> None:
        away = {rank for rank in collection.missing if rank not in self._links and self._unreachable(rank)}
        self._ended |= away
        for other in self._collections.values():
            other.missing -= away
        missing = sorted(collection.missing)
        link = self._links.get(min(collection.values, default=-1))
        if missing and link is not None:
            ranks = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing[:16]))}"
            self._send(link, {"kind": "late", "text": f"has waited {seconds:.0f} s for {ranks} {collection.purpose}"})

    # -- ranks that stand still --------------------------------------------------------------------

    def _consider(self) -> None:
        """Look for a deadlock once the status of every rank that lives is known: at all of them at once, not at each
        status.
        """
        away = sum(rank not in self._links for rank in self._ended)
        live = len(self._links) - len(self._ended) + away
        known = self._statuses and len(self._statuses) >= live and len(self._links) + away >= self._size
        if not self._asked or self._aborted or not known:
            self._asked = False
            return
        now = time.monotonic()
        if now - self._considered < _TICK:
            return
        self._considered, self._asked = now, False
        abort_reason, late = self._detect({rank: (now - came, said) for rank, (came, said) in self._statuses.items()})
        if abort_reason:
            self._give_up(abort_reason)
        for rank, text in late.items():
            self._send(self._links[rank], {"kind": "late", "text": text})
