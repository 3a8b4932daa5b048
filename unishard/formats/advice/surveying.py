"""Which configs a project has, what each is, and what it would become."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from unishard.config import value_at
from unishard.contract.rules import Fit
from unishard.errors import ConfigError, UnishardError
from unishard.formats import catalog
from unishard.formats.advice.checking import check
from unishard.formats.beside.engine_choice import PLAIN, RECIPES, needs_engine
from unishard.formats.files.source import open_source
from unishard.formats.other_tools import named
from unishard.formats.translating import Outcome, read, translate

_SUFFIXES = frozenset({".yaml", ".yml", ".json", ".toml"})
_OF_A_MODEL = {"architectures", "model_type", "transformers_version"}
"""Keys of a model's own config.json, which has sizes such as `num_layers` too."""
_ELSEWHERE = frozenset(
    {
        ".git",
        ".hg",
        ".svn",
        ".tox",
        ".nox",
        ".mypy_cache",
        ".ruff_cache",
        "node_modules",
        "__pycache__",
        "site-packages",
    }
)
_LARGEST = 2**20
_ENGINE = ("backend", "sharding.strategy")
_TOLD = (*_ENGINE, "precision.compute")
_LOUD_ENOUGH = 2
"""Of the keys that speak for a format, before a file counts as a config: files of other kinds have a word such as
`optimizer` too."""


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
    open_fields: tuple[str, ...] = ()
    """Fields that need input."""
    engine_open: bool = False
    """Whether it leaves the engine to its launcher, so that it is refused until `--with` or `--set` says it."""
    block: str = ""
    """Where in the file of another tool the config stands; empty where it is the whole file."""


@dataclass(frozen=True, slots=True)
class ForeignConfig:
    """A config of a tool that unishard does not read."""

    path: str
    tool: str
    instead: str
    """What to do with it."""


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


_Seen = FoundConfig | ForeignConfig | UnreadableConfig | SkippedFile


def survey(root: Path, to: str) -> Iterator[_Seen]:
    """Look at every file below a folder that may be a config. Writes nothing.

    Args:
        root: The folder.
        to: The format that each would become.

    Yields:
        What each YAML, JSON and TOML file is, in the order of their paths: each exactly once.
    """
    for path in _candidates(root, _SUFFIXES):
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


def _candidates(root: Path, suffixes: frozenset[str]) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        folders[:] = sorted(
            name for name in folders if name not in _ELSEWHERE and not (here / name / "pyvenv.cfg").exists()
        )
        for name in sorted(files):
            path = here / name
            if path.suffix.lower() in suffixes and path.is_file():
                yield path


def _look(path: Path, to: str) -> FoundConfig | ForeignConfig | None:
    source = open_source(path)
    other_tool = named(source.data) if not source.data.keys() & _OF_A_MODEL else None
    unread = other_tool is not None or catalog.loudest(source)[1] < _LOUD_ENOUGH
    block = catalog.block(source) if unread else None
    if unread and not block:
        if other_tool is not None:
            return ForeignConfig(str(path), other_tool[0].name, catalog.instead(other_tool[0], source))
        return ForeignConfig(str(path), "Hydra", catalog.OF_HYDRA) if catalog.loudly_of_hydra(source) else None
    from_ = catalog.BLOCKS if block else None
    engine_open = needs_engine(read(source, from_)) and to not in RECIPES
    # A stand-in, so that what becomes of the other keys is known.
    outcome = translate(source, to, from_=from_, overrides=(PLAIN,) if engine_open else ())
    reading = outcome.reading
    open_ = (*(_ENGINE if engine_open else ()), *reading.undecided)
    backend, strategy, precision = (
        "needs input" if field in open_ else value_at(reading.config, field) for field in _TOLD
    )
    return FoundConfig(
        str(path),
        reading.format,
        backend,
        strategy,
        precision,
        {fit: len(outcome.of(fit)) for fit in Fit},
        1 if engine_open else _status(outcome),
        open_,
        engine_open,
        block.key if block else "",
    )


def _status(outcome: Outcome) -> int:
    """What `unishard translate` would exit with."""
    status = outcome.status(strict=outcome.reading.config.strict)
    try:
        if not status:
            check(outcome)
    except ConfigError:
        return 1
    return status
