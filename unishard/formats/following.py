"""Finds the files that a launch line names, such as the launcher's config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from unishard.errors import ConfigError
from unishard.formats.launch_line import LaunchLine
from unishard.formats.shell_words import Word
from unishard.formats.source import Source, open_source
from unishard.mapping.entries import Entry, Meaning
from unishard.mapping.rules import Fit

__all__ = ["Named", "found", "launcher_named", "opened"]

_LAUNCHER = "config_file"
_ROOT = (".git", "pyproject.toml", "setup.py", "setup.cfg")
"""One of these is in the root of a project."""


class Named(NamedTuple):
    """A file that a launch line names."""

    option: str
    """As people write it."""
    word: Word
    path: Path | None
    """Where it is; None where it was not found."""


def launcher_named(line: LaunchLine, script: str) -> Named | None:
    """The config of Accelerate that a line names; None where it names none."""
    word = line.options.get(_LAUNCHER) if line.launcher == "accelerate" else None
    return Named("accelerate --config-file", word, found(word.text, script)) if word else None


def found(name: str, script: str) -> Path | None:
    """The file of this name: in the working directory, beside the script, or in a folder above it up to the root of its project."""
    return next((path for folder in (Path(), *_folders(script)) if _is_file(path := folder / Path(name).expanduser())), None)


def _folders(script: str) -> Iterator[Path]:
    if not script or not _is_file(Path(script)):
        return
    here = Path().resolve()
    for folder in Path(script).resolve().parents:
        yield _short(folder)
        if folder == here or any((folder / mark).exists() for mark in _ROOT):
            return


def _short(folder: Path) -> Path:
    """The folder as people write it, from the working directory where it is below that."""
    here = Path().resolve()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def opened(named: Named, place: str) -> Source | Entry:
    """What a named file says, or the entry that says why it counts for nothing."""
    if named.path is None:
        where = "in the working directory, beside the script and in the folders above it"
        return _missing(named, place, f"was not found ({where}): what it says is unknown; add it, or run where it is started")
    try:
        return open_source(named.path)
    except ConfigError as error:
        return _missing(named, place, str(error))


def _missing(named: Named, place: str, note: str) -> Entry:
    """The entry of a named file that cannot be read."""
    return Entry((named.option,), named.word.text, Meaning(Fit.APPROXIMATE, note, notable=True), place=place, beside=True)
