"""What goes wrong, and the points where it can: between a process and the disk, between a rank and the others, wherever a
save may be cut off."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

_COLLECTIVES = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
"""What `unishard.distributed.on_ranks` and torch.distributed.checkpoint (torch 2.13, checkpoint/utils.py) speak
with."""
_CHANGES = {"os.mkdir": "mkdir", "os.rename": "rename", "os.remove": "unlink", "os.rmdir": "rmdir"}
"""Audit events of what changes a directory; Python raises them just before (PEP 578)."""
_AREAS = {
    r"\.distcp$": "tensors",
    r"\.metadata": "index",
    r"manifest\.json": "manifest",
    r"(^|/)\.?latest": "latest",
    r"(^|/)\.trash-[^/]*$": "deleting",
    r"(^|/)\.old-[^/]*$": "replacing",
    r"(^|/)step-\d+(-[0-9a-f]{8})?$": "name",
    r"(^|/)\.tmp-[^/]*$": "directory",
    r"assets": "assets",
}


def stopped(what: BaseException) -> Callable[..., Any]:
    """A function that raises, in place of one that is called at a point."""

    def stop(*arguments: Any, **named: Any) -> Any:
        raise what

    return stop


def truncate(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def flip(path: Path, share: float, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[min(int(share * len(data)), len(data) - 1)] ^= 1 << bit
    path.write_bytes(data)


def killing(victims: Sequence[int]) -> Callable[[], None]:
    """What kills these ranks. Collective."""
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())

    def kill() -> None:
        for victim in victims:
            os.kill(pids[victim], signal.SIGKILL)

    return kill


class Event(NamedTuple):
    """A moment just before something is done, or in the middle of it."""

    kind: str
    """`open`, `write`, `half written`, `fsync`, `mkdir`, `rename`, `unlink`, `rmdir`, `talk`, `talked`."""
    where: str
    """To which part of a checkpoint, or by which collective."""


class Interception:
    """Tells of every event from its making to the end of the process. What `act` raises is raised in place of what was
    about to be done."""

    def __init__(self, act: Callable[[Event], None] = lambda event: None) -> None:
        self.act = act
        self._open, self._fsync = io.open, os.fsync
        io.open = self._opening  # that is what pathlib calls
        os.fsync = self._syncing  # type: ignore[assignment]
        for name in _COLLECTIVES:
            setattr(dist, name, self._around(name, getattr(dist, name)))
        sys.addaudithook(self._auditing)

    def _opening(self, file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if not set(mode) & set("wax+"):
            return self._open(file, mode, *arguments, **named)
        area = _area(os.fspath(file))
        self.act(Event("open", area))
        return _Watched(self._open(file, mode, *arguments, **named), area, self)

    def _syncing(self, descriptor: int) -> None:
        self.act(Event("fsync", _area(os.readlink(f"/proc/self/fd/{descriptor}"))))
        self._fsync(descriptor)

    def _around(self, name: str, talk: Callable[..., Any]) -> Callable[..., Any]:
        def talking(*arguments: Any, **named: Any) -> Any:
            self.act(Event("talk", name))
            answer = talk(*arguments, **named)
            self.act(Event("talked", name))
            return answer

        return talking

    def _auditing(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name not in _CHANGES:
            return
        path = os.fspath(arguments[1 if name == "os.rename" else 0])
        relative = name != "os.rename" and arguments[-1] != -1  # to an open directory, as rmtree does it
        self.act(Event(_CHANGES[name], "deleting" if relative else _area(path)))


class _Watched:
    """A file that is open for writing."""

    def __init__(self, file: Any, area: str, interception: Interception) -> None:
        self._file, self._area, self._interception = file, area, interception

    def write(self, data: Any) -> int:
        """In two halves, the first of which is in the file before the second one is tried."""
        whole = data if isinstance(data, str) else memoryview(data).cast("B")
        half = len(whole) // 2
        self._interception.act(Event("write", self._area))
        count: int = self._file.write(whole[:half])
        self._file.flush()
        self._interception.act(Event("half written", self._area))
        return count + int(self._file.write(whole[half:]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _area(path: str) -> str:
    name = Path(path).as_posix()
    return next((area for pattern, area in _AREAS.items() if re.search(pattern, name)), "root")
