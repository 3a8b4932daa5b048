"""Opens the files that a document names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unishard.errors import ConfigError
from unishard.formats.source import Source, open_source

__all__ = ["opened"]


def opened(name: str, source: Source) -> Mapping[str, Any] | str:
    """What a named file holds, looked for beside the document and in the working directory; or what is wrong with it."""
    folders = [folder for folder in (source.folder, Path()) if folder is not None]
    candidates = [folder / Path(name).expanduser() for folder in folders]
    found = next((path for path in candidates if _there(path)), None)
    if found is None:
        return (
            f"{name} is not there, neither beside this document nor in the working directory; put it there, or write what it holds in "
            "its place"
        )
    try:
        return open_source(found).data
    except ConfigError as error:
        return str(error)


def _there(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
