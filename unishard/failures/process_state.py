"""Whether a process that answers nothing is stopped, or runs C code that holds Python's lock, such as `json.load`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_STOPPED = {"T", "t"}
"""By a signal or a debugger (proc(5), /proc/pid/stat)."""


def own() -> list[Any]:
    """What names this process to another one: where its number counts, and that number."""
    return [_numbering(), os.getpid()]


def is_stopped(process: Any) -> bool:
    """Whether a process is known to be stopped: one of another machine is not.

    Args:
        process: What `own` has returned in it.
    """
    where, number = process or ("", 0)
    if not where or where != _numbering():
        return False
    try:
        # The name, in parentheses, may contain anything.
        state = Path(f"/proc/{int(number)}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # it has ended, which its connection tells
        return False
    return state in _STOPPED


def _numbering() -> str:
    """The machine since it was booted, and the namespace of its process numbers; empty on another system than Linux."""
    try:
        return f"{_BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
