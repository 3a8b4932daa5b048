"""The disk for `offload` with `nvme`: what it is, and how fast it reads and writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from unishard.errors import BackendError, ConfigError
from unishard.nvme.rank_file import RankFile, aligned_buffer
from unishard.tools.doctor.check import Check, Status

_PIECE, _PIECES = 2**25, 8
_STATE = 8
"""Bytes that AdamW keeps for each element."""


def disk(directory: Path) -> Check:
    """Write and read 256 MiB in a file without a name, as an update does; it is gone afterwards."""
    name = f"disk {directory}"
    try:
        file = RankFile(directory, 0)
    except ConfigError as error:
        return Check(name, Status.FAIL, error.problems[0].what)
    try:
        file.allocate(_PIECE * _PIECES)
        memory, values = aligned_buffer(_PIECE)
        values.random_()
        written, read = _seconds(file.write, memory), _seconds(file.read, memory)
    except (OSError, BackendError) as error:
        return Check(name, Status.FAIL, str(error), "name another directory")
    finally:
        file.close()
    speeds = {kind: _PIECE * _PIECES / seconds / 1e9 for kind, seconds in (("read", read), ("written", written))}
    billion = max(_STATE / speed for speed in speeds.values())
    found = (
        f"{file.kind or 'unknown'}, {' and '.join(f'{speed:.2f} GB/s {kind}' for kind, speed in speeds.items())}: an "
        f"update of a billion elements with AdamW takes {billion:.1f} s or more"
    )
    details = {"file_system": file.kind, **{f"gigabytes_per_second_{kind}": speed for kind, speed in speeds.items()}}
    if file.over_network:
        return Check(name, Status.WARN, found, "name a directory on a local disk", details)
    return Check(name, Status.OK, found, details=details)


def _seconds(move: Callable[[int, memoryview], None], memory: memoryview) -> float:
    began = time.perf_counter()
    for number in range(_PIECES):
        move(number * _PIECE, memory)
    return time.perf_counter() - began
