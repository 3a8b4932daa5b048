"""What a process holds, and what of it has grown."""

from __future__ import annotations

import gc
import os
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["ROOM", "WARM", "Usage", "grown", "types_of_objects", "usage"]

WARM = 4
"""Engines of a life until caches are filled, one of each strategy; from the last of them on nothing may grow."""


class Usage(NamedTuple):
    """What a process holds once an engine is closed."""

    memory: float
    """Resident, in MiB."""
    files: int
    threads: int
    shared: int
    """Mappings of /dev/shm."""
    objects: int
    """Python objects that the garbage collector knows."""
    alive: int
    """Closed engines and models that are not freed."""


ROOM = Usage(memory=12.0, files=0, threads=0, shared=0, objects=200, alive=0)
"""Growth that is allowed in a life: memory for glibc (MALLOC_ARENA_MAX=2), objects for what torch remembers of what it
has seen."""


def usage(closed: list[weakref.ref[Any]]) -> Usage:
    """Of this process, now.

    Args:
        closed: What should be freed.
    """
    gc.collect()
    alive = sum(each() is not None for each in closed)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    maps = Path("/proc/self/maps").read_text()
    files, threads = (len(os.listdir(f"/proc/self/{each}")) for each in ("fd", "task"))
    return Usage(
        pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        files,
        threads,
        maps.count("/dev/shm/"),
        len(gc.get_objects()),
        alive,
    )


def types_of_objects() -> Counter[str]:
    """How many objects there are of each type."""
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())


def grown(usages: list[Usage], more: Counter[str], room: Usage = ROOM) -> list[str]:
    """What has grown in a life since it was warm; empty if nothing.

    Args:
        usages: After each engine.
        more: By type, objects that were added since then.
        room: Growth that is allowed.
    """
    if len(usages) <= WARM:
        return []
    before, after = usages[WARM - 1]._asdict(), usages[-1]._asdict()
    found = [
        f"{name} from {before[name]:.0f} to {after[name]:.0f}"
        for name, most in room._asdict().items()
        if after[name] - before[name] > most
    ]
    if after["objects"] - before["objects"] > room.objects:
        found.append("more " + ", ".join(f"{name} ({count})" for name, count in more.most_common(8)))
    return found + ([f"{after['alive']} closed engines or models are alive"] if after["alive"] else [])
