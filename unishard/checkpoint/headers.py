"""The few facts of a manifest that order checkpoints: its run, its place in the order of commits, its metric."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from unishard.checkpoint import manifest as manifests
from unishard.errors import CheckpointError

UNKNOWN_RUN = "0" * 8
"""The run of checkpoints whose manifest names none, such as those of earlier versions. They count as one run."""


class Header(NamedTuple):
    """The facts of one checkpoint."""

    run: str
    commit: int
    """Its number among the commits of its root; 0 if the manifest has none."""
    written: str
    metric: float | None


def header_of(folder: Path) -> Header | None:
    """The header of a checkpoint; None if its manifest cannot be read.

    A file that has not changed is read once per process.
    """
    try:
        status = os.stat(folder / manifests.FILE)
        return _read(os.fspath(folder), (status.st_ino, status.st_size, status.st_mtime_ns))
    except (OSError, CheckpointError):
        return None


@lru_cache(maxsize=4096)
def _read(folder: str, version: tuple[int, int, int]) -> Header:
    facts = manifests.read(Path(folder))
    return Header(facts.run or UNKNOWN_RUN, facts.commit or 0, facts.written, facts.metric)
