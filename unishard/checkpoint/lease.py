"""The file that says which run owns a directory of checkpoints: `<root>/.owner`, its successor `.owner-1`, and so on.

Needs no locks, which shared disks may lack: the highest number owns the directory, and whoever takes over makes the
next one in mode `xb`, which fails if it is there already. One line of JSON names the run and the process of rank 0, the
next one has a number that grows while it lives. Clocks of two machines are not compared: whether a process on another
machine lives is seen by whether its number grows.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from unishard.checkpoint.disk import fsync
from unishard.checkpoint.files import read_bytes
from unishard.distributed.processes import is_running, machine, started
from unishard.errors import CheckpointError

FILE = ".owner"
_NAME = re.compile(r"\.owner(?:-(\d{1,9}))?")
BEAT = 5.0
"""Seconds between two beats of a living owner."""
LIMIT = 60.0
"""Seconds without a beat after which the owner on another machine counts as gone."""
GRACE = 10.0
"""Seconds in which a living owner on this machine may end: one whose launcher was killed does."""
_POLL = 0.25
_LONGEST = 4096
_DIGITS = 20
RELEASED = "released"

_logger = logging.getLogger("unishard")
_token: tuple[int, str] = (0, "")


def token() -> str:
    """16 hexadecimal digits that name this process."""
    global _token
    if _token[0] != os.getpid():  # not those of the process that has forked this one
        _token = os.getpid(), uuid4().hex[:16]
    return _token[1]


@dataclass(frozen=True, slots=True)
class Lease:
    """Who owns a directory."""

    owner: str = ""
    """`token` of its process; empty where the file cannot be read."""
    run: str = "unknown"
    host: str = "unknown"
    machine: str = ""
    pid: int = 0
    started: str = ""
    since: str = "unknown"
    file: int = 0
    """Number of the file: a copy of the directory has another one."""
    number: int = 0
    """Of the file's name."""
    beats: str = field(default="", compare=False)
    """The second line."""

    def __str__(self) -> str:
        return f"run {self.run} (process {self.pid} on {self.host}, since {self.since})"

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended for certain, seen from this machine."""
        return self.beats.strip() == RELEASED or (self._is_here and not is_running(self.pid, self.started))

    @property
    def is_living(self) -> bool:
        """Whether its process runs for certain, seen from this machine."""
        return self._is_here and not self.is_gone

    @property
    def _is_here(self) -> bool:
        return bool(self.machine) and self.machine == machine()


_SAID = tuple(field.name for field in fields(Lease) if field.name not in ("number", "beats"))
"""What the first line has."""


def read(root: Path) -> Lease | None:
    """Who owns a directory; None if nobody ever has."""
    path = root / FILE
    try:
        files = _files(root)
        if not files:
            return None
        number, path = files[-1]
        head, _, beats = read_bytes(path, _LONGEST).partition(b"\n")
        there = replace(parsed(head, beats.decode("ascii", "replace")), number=number)
        copied = there.file != path.stat().st_ino
    except (FileNotFoundError, NotADirectoryError):  # a successor may have deleted it
        return None
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror or error}); delete it if no run saves here"
        ) from error
    # Of a copy the process says nothing; a file system may also number its files anew.
    return replace(there, machine="") if copied else there


def acquire(root: Path, run: str, gone: str | None = None) -> None:
    """Become the owner of a directory, which exists.

    Waits up to `GRACE` for an owner on this machine to end, and up to `LIMIT` for a sign of life of one on another
    machine.

    Args:
        root: The directory.
        run: The run, for the messages of others.
        gone: `Lease.owner` of one whose process is known to have ended.

    Raises:
        CheckpointError: A living run owns it.
        OSError: The file cannot be written.
    """
    while (there := read(root)) is None or there.owner != token():
        if there is None or there.is_gone or there.owner == gone or has_ended(there, lambda: read(root), root):
            _create(root, run, 0 if there is None else there.number + 1)
        elif (now := read(root)) is not None and now.owner == there.owner:
            raise CheckpointError(
                f"{root}: {there} saves here and is still alive, and two runs would delete each other's checkpoints; "
                "set another "
                "checkpoint.dir, or end that run first. To read a checkpoint meanwhile, use prepare(..., train=False)"
            )
    beat(root, 0)  # this process may have released it before


def beat(root: Path, number: int) -> bool:
    """Show that this process lives; False if it is no longer the owner."""
    return _note(root, f"{number:0{_DIGITS}}")


def release(root: Path) -> None:
    """Say that its owner, this process, has ended.

    The file stays, so that a run that was stopped meanwhile sees who came after it.
    """
    _note(root, RELEASED)


def _note(root: Path, text: str) -> bool:
    """Replace the second line, in the file whose first line was read: never in that of another owner."""
    try:
        with _files(root)[-1][1].open("r+b") as file:
            head = file.readline(_LONGEST)
            if parsed(head, "").owner != token():
                return False
            os.pwrite(file.fileno(), f"{text:{_DIGITS}}\n".encode(), len(head))
    except (OSError, IndexError):  # the next beat tries again
        return True
    return True


def has_ended(there: Lease, read: Callable[[], Lease | None], shown: Path | str, poll: float = _POLL) -> bool:
    """Wait for the end of an owner, or for a sign of life.

    Args:
        there: The owner.
        read: Reads it anew.
        shown: What it owns.
        poll: Seconds between two looks.
    """
    patience = GRACE if there.is_living else LIMIT
    _logger.warning(
        "%s: %s owns this directory; waiting up to %.0f s to see whether it has ended", shown, there, patience
    )
    end = time.monotonic() + patience
    while time.monotonic() < end:
        time.sleep(poll)
        now = read()
        if now is None or now != there or (now.beats != there.beats and not there.is_living):
            return now is not None and now.owner == there.owner and now.is_gone
        if now.is_gone:
            return True
    return not there.is_living


def _create(root: Path, run: str, number: int) -> None:
    """Make the file of this number, unless there is one: `read` says whose it is."""
    with contextlib.suppress(FileExistsError), (root / f"{FILE}{f'-{number}' if number else ''}").open("xb") as file:
        file.write(text_of(run, os.fstat(file.fileno()).st_ino))
        file.flush()
        os.fsync(file.fileno())
    for _, path in _files(root)[:-1]:
        path.unlink(missing_ok=True)
    fsync(root)


def _files(root: Path) -> list[tuple[int, Path]]:
    """The leases in a directory by their numbers; the last one counts."""
    found = [(entry, _NAME.fullmatch(entry)) for entry in os.listdir(root)]
    return sorted((int(match[1] or 0), root / entry) for entry, match in found if match is not None)


def text_of(run: str, file: int) -> bytes:
    """A new lease of this process as it is written, before its first beat."""
    now, pid = datetime.now(UTC).isoformat(timespec="seconds"), os.getpid()
    here = Lease(token(), run, socket.gethostname(), machine(), pid, started(pid), now, file)
    record = {name: getattr(here, name) for name in _SAID}
    return f"{json.dumps(record)}\n{0:0{_DIGITS}}\n".encode()


def parsed(head: bytes, beats: str) -> Lease:
    """A lease from its first line; a lease without an owner if that line is something else."""
    try:
        record = json.loads(head)
        values = {name: record[name] for name in _SAID}
    except (ValueError, KeyError, TypeError, RecursionError):
        return Lease(beats=head.hex() + beats)
    if any(type(value) is not (int if name in ("pid", "file") else str) for name, value in values.items()):
        return Lease(beats=head.hex() + beats)
    return Lease(**{name: _shown(value) for name, value in values.items()}, beats=beats)


def _shown(value: Any) -> Any:
    """A value without control characters for a terminal."""
    return (
        "".join(character if character.isprintable() else "?" for character in value)
        if isinstance(value, str)
        else value
    )
