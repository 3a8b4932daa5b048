"""Checks what a training takes from the operating system: shared memory, open files, and the disk of its
checkpoints.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from unishard.tools.doctor.check import Check, Status

_SHARED = Path("/dev/shm")
_SHARED_LEAST = 2**30
_FILES_LEAST = 4096
_BLOCK = 16 * 2**20
_BLOCKS = 16
_SLOW = 100e6
"""Bytes per second below which a checkpoint of a small model already takes minutes."""


def machine() -> Iterator[Check]:
    """Check the limits of this process."""
    if _SHARED.is_dir():
        yield _shared_memory(shutil.disk_usage(_SHARED).total)
    yield _open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def _shared_memory(size: int) -> Check:
    details = {"bytes": size}
    if size < _SHARED_LEAST:
        found = f"{size / 2**20:.0f} MiB in {_SHARED}; workers of a DataLoader and NCCL may fail with a bus error"
        return Check(
            "shared memory", Status.WARN, found, "start the container with --shm-size=8g or --ipc=host", details
        )
    return Check("shared memory", Status.OK, f"{size / 2**30:.1f} GiB in {_SHARED}", details=details)


def _open_files(soft: int, hard: int) -> Check:
    words = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    if soft != resource.RLIM_INFINITY and soft < _FILES_LEAST:
        most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        found = f"{words}; many ranks and loader workers need more"
        return Check("open files", Status.WARN, found, f"run: ulimit -n {most}", {"limit": soft})
    return Check("open files", Status.OK, words, details={"limit": soft})


def disk(directory: Path) -> Check:
    """Measure how fast a directory, or the nearest one above it that exists, is written and read: one file of 256 MiB,
    then removed.
    """
    place = next((each for each in (directory.absolute(), *directory.absolute().parents) if each.is_dir()), Path("/"))
    try:
        free = shutil.disk_usage(place).free
        if free < 2 * _BLOCKS * _BLOCK:
            return Check(
                "disk",
                Status.FAIL,
                f"{free / 2**20:.0f} MiB free in {place}",
                "free some space, or choose another directory",
            )
        written, read = _speeds(place)
    except OSError as error:
        return Check(
            "disk", Status.FAIL, f"cannot write in {place}: {error.strerror or error}", "choose a writable directory"
        )
    details = {
        "directory": str(place),
        "free_bytes": free,
        "write_bytes_per_s": round(written),
        "read_bytes_per_s": round(read),
    }
    found = f"{place}: writes {written / 1e6:.0f} MB/s, reads {read / 1e6:.0f} MB/s, {free / 2**30:.0f} GiB free"
    if written < _SLOW:
        return Check(
            "disk",
            Status.WARN,
            found,
            "save checkpoints on a faster file system, or set checkpoint.async_save",
            details,
        )
    return Check("disk", Status.OK, found, details=details)


def _speeds(place: Path) -> tuple[float, float]:
    """Bytes per second, of writing down to the disk, and of reading what is not in the page cache."""
    block = os.urandom(_BLOCK)  # random: some file systems compress
    with tempfile.TemporaryFile(dir=place, prefix=".unishard-doctor-") as file:
        began = time.perf_counter()
        for _ in range(_BLOCKS):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - began
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began = time.perf_counter()
        while file.read(_BLOCK):
            pass
        read = time.perf_counter() - began
    return _BLOCKS * _BLOCK / max(written, 1e-9), _BLOCKS * _BLOCK / max(read, 1e-9)
