"""Which configs a project has, what each is, and what it would become."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from unishard.config import value_at
from unishard.errors import ConfigError, UnishardError
from unishard.formats import catalog
from unishard.formats.checking import check
from unishard.formats.source import open_source
from unishard.formats.translating import Outcome, translate
from unishard.mapping.rules import Fit

__all__ = ["FoundConfig", "SkippedFile", "UnreadableConfig", "survey"]

_SUFFIXES = frozenset({".yaml", ".yml", ".json", ".toml"})
_ELSEWHERE = frozenset(
    {".git", ".hg", ".svn", ".tox", ".nox", ".mypy_cache", ".ruff_cache", "node_modules", "__pycache__", "site-packages"}
)
_LARGEST = 2**20
_TOLD = ("backend", "sharding.strategy", "precision.compute")
_LOUD_ENOUGH = 2
"""Of the keys that speak for a format, before a file counts as a config: files of other kinds have a word such as `optimizer` too."""


@dataclass(frozen=True, slots=True)
class FoundConfig:
    """A config that was found."""

    path: str
    format: str
    backend: str
    strategy: str
    precision: str
    counts: Mapping[Fit, int]
    """Of its keys."""
    status: int
    """What `unishard translate` would exit with."""


@dataclass(frozen=True, slots=True)
class UnreadableConfig:
    """A file that may be a config and cannot be read as one."""

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A YAML, JSON or TOML file that was not looked at, or in which no key speaks for a tool."""

    path: str
    why: str


def survey(root: Path, to: str) -> Iterator[FoundConfig | UnreadableConfig | SkippedFile]:
    """Look at every file below a folder that may be a config. Writes nothing.

    Args:
        root: The folder.
        to: The format that each would become.

    Yields:
        What each YAML, JSON and TOML file is, in the order of their paths: each exactly once.
    """
    for path in _candidates(root):
        try:
            if path.stat().st_size > _LARGEST:
                yield SkippedFile(str(path), "above 1 MiB")
            else:
                yield _look(path, to) or SkippedFile(str(path), "not a config")
        except UnishardError as error:
            yield _failed(path, str(error))
        except OSError as error:
            yield UnreadableConfig(str(path), f"cannot be opened ({error.strerror})")


def _failed(path: Path, message: str) -> UnreadableConfig | SkippedFile:
    if not catalog.mentions(path.read_text(encoding="utf-8", errors="replace")):
        return SkippedFile(str(path), "not a config")
    return UnreadableConfig(str(path), message.splitlines()[0].removeprefix(str(path)).lstrip(": "))


def _candidates(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        folders[:] = sorted(name for name in folders if name not in _ELSEWHERE and not (here / name / "pyvenv.cfg").exists())
        for name in sorted(files):
            path = here / name
            if path.suffix.lower() in _SUFFIXES and path.is_file():
                yield path


def _look(path: Path, to: str) -> FoundConfig | None:
    source = open_source(path)
    if catalog.loudest(source)[1] < _LOUD_ENOUGH:
        return None
    outcome = translate(path, to)
    reading, config = outcome.reading, outcome.reading.config
    counts = {fit: len(outcome.of(fit)) for fit in Fit}
    backend, strategy, precision = ("needs input" if field in reading.undecided else value_at(config, field) for field in _TOLD)
    return FoundConfig(str(path), reading.format, backend, strategy, precision, counts, _status(outcome))


def _status(outcome: Outcome) -> int:
    """What `unishard translate` would exit with."""
    status = outcome.status(strict=outcome.reading.config.strict)
    try:
        if not status:
            check(outcome)
    except ConfigError:
        return 1
    return status
