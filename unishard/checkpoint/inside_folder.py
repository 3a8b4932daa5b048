"""Paths that a file names, such as an index or a manifest: they stay within the folder of that file."""

from __future__ import annotations

import os
from pathlib import Path, PurePath


class OutsideFolderError(ValueError):
    """A name leads out of its folder."""


def file_inside(folder: Path, name: str) -> Path:
    """The path of a file in a folder.

    It may be a link within the folder, or one of the Hugging Face cache to its blobs.

    Args:
        folder: The folder; may be a link itself.
        name: Relative to it, from a file that is not trusted.

    Raises:
        OutsideFolderError: It lies outside the folder; says how.
    """
    if leaves(name):
        raise OutsideFolderError(f"{name!r:.200} lies outside the folder")
    path = folder / name
    try:
        home, target = folder.resolve(), path.resolve()
    except (OSError, RuntimeError):  # links in a circle; opening it says so
        return path
    blobs = [
        home.parents[depth].parent / "blobs"
        for depth in range(len(home.parents))
        if home.parents[depth].name == "snapshots"
    ]
    if not any(target.is_relative_to(root) for root in (home, *blobs)):
        raise OutsideFolderError(f"{name!r:.200} is a link to {target}, outside the folder")
    return path


def leaves(name: str) -> bool:
    """Whether a name leads out of the folder that it is relative to, or cannot be a path."""
    path = PurePath(name)
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # half of a surrogate pair
        return True
    return not name or "\0" in name or path.is_absolute() or ".." in path.parts
