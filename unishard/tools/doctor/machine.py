"""Checks what a training takes from the operating system: shared memory, open files, and the disk of its
checkpoints.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unishard.tools.doctor.check import Check, Status, one_line, quietly

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


# -- Checks the accelerators that torch can use, and the environment variables about them ----------

_DRIVER = Path("/proc/driver/nvidia/version")


def driver() -> str | None:
    """Version of this machine's NVIDIA driver; None if there is none."""
    try:
        text = _DRIVER.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return found[0] if (found := re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)) else "of unknown version"


def devices() -> Iterator[Check]:
    """Check the accelerators, and the environment variables about them. Imports torch."""
    torch = import_module("torch")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield _accelerators(torch, count, [str(one.message).splitlines()[0] for one in caught])
    yield from (_device(torch, index) for index in range(count))
    if "DS_ACCELERATOR" in os.environ and find_spec("deepspeed"):
        yield _exported(os.environ["DS_ACCELERATOR"], "cuda" if count else "cpu")


def _accelerators(torch: Any, count: int, warned: list[str]) -> Check:
    build, here = torch.version.cuda or getattr(torch.version, "hip", None), driver()
    details = {"count": count, "cuda": torch.version.cuda, "driver": here}
    of = f"torch built for CUDA {torch.version.cuda}, driver {here or 'unknown'}"
    if count:
        return Check("accelerators", Status.OK, f"{count}; {of}" if torch.version.cuda else str(count), details=details)
    if here and not build:
        why = f"none: this torch is a CPU build, but the machine has an NVIDIA driver ({here})"
        return Check(
            "accelerators",
            Status.WARN,
            why,
            "install a CUDA build of torch (https://pytorch.org/get-started/locally)",
            details,
        )
    if here:
        why = f"none: {of}" + (f"; torch says: {warned[0]}" if warned else "")
        instead = "update the driver or install a torch built for an older CUDA; look at CUDA_VISIBLE_DEVICES"
        return Check("accelerators", Status.WARN, why, instead, details)
    return Check("accelerators", Status.OK, "none; trains on the CPU", details=details)


def _device(torch: Any, index: int) -> Check:
    """Check a device by a sum: fails if torch has no kernels for it, or if another process uses it exclusively."""
    name = f"device cuda:{index}"
    try:
        with quietly():
            model = torch.cuda.get_device_name(index)
            torch.ones(8, device=f"cuda:{index}").sum().item()
    except Exception as error:  # torch raises RuntimeError and its subclasses, drivers raise others
        built = ", ".join(torch.cuda.get_arch_list())
        return Check(
            name, Status.FAIL, f"cannot compute: {one_line(error)}", f"install a torch built for it (this one: {built})"
        )
    return Check(name, Status.OK, model, details={"name": model})


def _exported(value: str, right: str) -> Check:
    """Check DS_ACCELERATOR, which DeepSpeed trusts over what torch finds."""
    if value == right:
        return Check("DS_ACCELERATOR", Status.OK, value)
    return Check(
        "DS_ACCELERATOR", Status.FAIL, f"exported as {value!r}, but torch computes on {right}", "unset DS_ACCELERATOR"
    )
