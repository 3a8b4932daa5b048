"""What can be wrong with a file that somebody else has written, and what must not come of it."""

from __future__ import annotations

import copy
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

__all__ = ["ODD", "PLACES", "WHOLE", "bounded", "damaged", "truncated", "with_odd_values"]

SECONDS, ROOM = 5.0, 1 << 30
"""Processor time, and address space in bytes, that a small file may take."""

ODD = (
    None,
    True,
    -1,
    2**63,
    float("inf"),
    1.5,
    "",
    "\0",
    "../x",
    "/etc/passwd",
    "x" * 5000,
    [],
    {},
    [[]],
    {"a": None},
    [1, "a"],
    "inf",
)
"""Values in place of another one. `inf` is read from 1e400, and written as Infinity."""
WHOLE = (
    b"",
    b"\0",
    b"\xff\xfe\x00",
    b"null",
    b"1e400",
    b"9" * 5000,
    b"[]",
    b"{}",
    b'"a"',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"a": ' + b"9" * 5000 + b"}",
    b'{"a": 1e400, "b": -1e400, "c": NaN}',
    b"- " * 100_000,
    b"a: &a [*a]\n",
    b"a: &a [x, x]\nb: &b [*a, *a]\n"
    + b"".join(b"%c: &%c [*%c, *%c]\n" % (c + 1, c + 1, c, c) for c in range(98, 120)),
    b"[" + b"a." * 50_000 + b"a]",
    b"(" * 100_000,
    b"$(" * 50_000,
    bytes(range(256)) * 16,
    b"\xff\xff\xff\xff\xff\xff\xff\x7f{}",
    b"\x80\x04cos\nsystem\n(S'touch hostile'\ntR.",
)
"""What stands in place of the whole file."""
TOKENS = (
    b"\0",
    b"\xff",
    b"[" * 3000,
    b'{"a":' * 500,
    b"9" * 5000,
    b"1e400",
    b"../",
    b"\n",
    b"'",
    b'"',
    b"${",
    b"!!python/object:os.system ",
)


def truncated(valid: bytes, most: int) -> Iterator[bytes]:
    """The beginning of a file, at every position or at so many."""
    return (valid[:length] for length in range(0, len(valid), max(1, len(valid) // most)))


@st.composite
def damaged(draw: st.DrawFn, valid: bytes) -> bytes:
    """A file with up to three bytes changed, removed or inserted."""
    text = valid
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(text)))
        new = draw(st.binary(min_size=1, max_size=4) | st.sampled_from(TOKENS))
        text = text[:at] + new + text[at + draw(st.integers(0, 8)) :]
    return text


def with_odd_values(valid: bytes) -> Iterator[bytes]:
    """A JSON file with another value in one place: each place with each value."""
    data = json.loads(valid)
    for path in _paths(data, ()):
        for value in ODD:
            other = copy.deepcopy(data)
            inside = other
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = value
            yield json.dumps(other).encode()


def _paths(data: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from _paths(value, (*path, key))


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _endless(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


PLACES: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link in a circle": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": _socket,
    "a file without an end": _endless,
}
"""What stands in place of a file."""


class _Writes:
    """Where this process has written outside a folder."""

    folder = ""
    found: list[str]

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder and event in (
            "open",
            "os.mkdir",
            "os.rename",
            "os.remove",
            "os.system",
            "subprocess.Popen",
            "os.symlink",
        ):
            # A relative name is one in a folder that is open, as shutil.rmtree removes files.
            path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
            reads = event == "open" and not (
                isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
            if not reads and os.path.isabs(path) and not path.startswith((self.folder, "/dev/", "/proc/")):
                self.found.append(f"{event} {path}")


_WRITES = _Writes()
sys.addaudithook(_WRITES)


def _hangs(*_: Any) -> None:
    raise TimeoutError("it waits")


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def bounded(folder: Path) -> Iterator[None]:
    """Fails where what is inside waits, takes much time or memory, or writes outside the folder."""
    before, began, used = signal.signal(signal.SIGALRM, _hangs), time.process_time(), _address_space()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * ROOM, limits[1]))
    _WRITES.folder, _WRITES.found = str(folder), []
    signal.setitimer(signal.ITIMER_REAL, 60.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        _WRITES.folder = ""
    assert time.process_time() - began < SECONDS
    assert _address_space() - used < ROOM
    assert not _WRITES.found, _WRITES.found
