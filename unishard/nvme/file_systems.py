"""What a directory is on: a disk, memory, or a network. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

_IN_MEMORY = ("tmpfs", "ramfs")
_OVER_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "beegfs", "gpfs", "fuse.sshfs", "9p")


def file_system_of(directory: Path) -> str:
    """The type of the file system that a directory is on, or will be if it does not exist yet, such as `ext4`; empty if
    Linux does not say.
    """
    there = next(each for each in (directory.absolute(), *directory.absolute().parents) if each.exists())
    device = os.stat(there).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(" - ")[2].split()[0] for line in mounts if line.split()[2] == number), "")


def in_memory(directory: Path) -> str:
    """Why files in a directory would be of no use for `offload`; empty if they would not lie in memory."""
    kind = file_system_of(directory)
    return f"{directory} is a {kind}, whose files lie in memory; name a directory on a disk" * (kind in _IN_MEMORY)


def is_over_network(kind: str) -> bool:
    """Whether reads and writes leave the node, by the type of a file system."""
    return kind in _OVER_NETWORK
