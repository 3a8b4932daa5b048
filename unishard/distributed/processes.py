"""Whether a process still runs: by its number and when it was started, since numbers are given again.

Linux only; imports no torch.
"""

from __future__ import annotations

import os
from pathlib import Path

_ENDED = ("Z", "X")
"""States of a process that has ended, which its parent has not asked about (proc(5))."""


def started(pid: int) -> str:
    """When a process was started, in ticks since the start of the machine; empty if it has ended, or where there is no
    /proc.
    """
    fields = _fields(pid)
    return "" if len(fields) < 20 or fields[0] in _ENDED else fields[19]


def parent(pid: int) -> int:
    """The process that has started another one; 0 if unknown."""
    fields = _fields(pid)
    return int(fields[1]) if len(fields) > 1 else 0


def is_running(pid: int, when: str) -> bool:
    """Whether the process of this number that was started then still runs, on this machine."""
    return bool(when) and started(pid) == when


def _fields(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # what precedes is the name of the program, which may contain anything


def machine() -> str:
    """Where numbers of processes mean the same: this machine since its start, and this container; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
