"""Write a command's output file atomically."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from unishard.errors import UnishardError


def require_folder(path: Path) -> None:
    """Raise UnishardError where the folder of a file is not there; before what takes long to write into it."""
    if not path.parent.is_dir():
        raise UnishardError(
            f"{path}: cannot be written: there is no folder {path.parent}; make it, or name another file"
        )


def save(path: Path, text: str) -> None:
    """Write a file atomically; a pipe or a device is written directly.

    Raises:
        UnishardError: The file cannot be written.
    """
    try:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            mode = stat.S_IFREG | 0o666 & ~_umask()
        if stat.S_ISREG(mode):
            _replace(Path(os.path.realpath(path)), text, stat.S_IMODE(mode))
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnishardError(
            f"{path}: cannot be written ({error.strerror}); name a file in an existing, writable directory"
        ) from None


def _replace(path: Path, text: str, mode: int) -> None:
    """Replace or create a file atomically."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        Path(draft).chmod(mode)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
