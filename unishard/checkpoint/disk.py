"""Brings what has been written to the disk."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["fsync"]


def fsync(path: Path) -> None:
    """Bring a file, or what a directory says of its files, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
