"""Which configs a project has, what each is, what it would become, and which launch script or line of a README starts
the training with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from unishard.config import value_at
from unishard.contract.rules import Fit
from unishard.errors import ConfigError, UnishardError
from unishard.formats import catalog
from unishard.formats.checking import check
from unishard.formats.launch_line import LaunchLine, launch_lines
from unishard.formats.other_tools import named
from unishard.formats.shell_words import Word
from unishard.formats.sidecar.following import names, recipe_named
from unishard.formats.sidecar.launcher import engine_is_open
from unishard.formats.sidecar.sidecar import PAGES, script_text
from unishard.formats.source import open_source
from unishard.formats.translating import Outcome, translate

_SCRIPTS = frozenset({".sh", ".bash", ".slurm", ".sbatch", *PAGES})
_LAUNCHER = ("distributed_type:", '"distributed_type"')
"""In each config of Accelerate."""
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
_TOLD = ("backend", "sharding.strategy", "precision.compute")
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
    """Fields that need input, which a launch script may have."""
    script: str = ""
    """A launch script of the project that names the config, for `--with`; empty where there is none."""
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
    small = partial(filter, lambda path: path.stat().st_size <= _LARGEST)
    scripts = LaunchScripts(small(_candidates(root, LaunchScripts.suffixes)), small(_candidates(root, _SUFFIXES)))
    for path in _candidates(root, _SUFFIXES):
        try:
            if path.stat().st_size > _LARGEST:
                yield SkippedFile(str(path), "above 1 MiB")
            else:
                yield _look(path, to, scripts) or SkippedFile(str(path), "not a config")
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


def _look(path: Path, to: str, scripts: LaunchScripts) -> FoundConfig | ForeignConfig | None:
    source = open_source(path)
    other = named(source.data) if not source.data.keys() & _OF_A_MODEL else None
    unread = other is not None or catalog.loudest(source)[1] < _LOUD_ENOUGH
    block = catalog.block(source) if unread else None
    if unread and not block:
        if other is not None:
            return ForeignConfig(str(path), other[0].name, catalog.instead(other[0], source))
        return ForeignConfig(str(path), "Hydra", catalog.OF_HYDRA) if catalog.loudly_of_hydra(source) else None
    plain = translate(source, to, from_=catalog.BLOCKS if block else None)
    decided = not engine_is_open(plain.reading.entries)
    script, outcome = (
        scripts.filling(path, to, plain) if not block and (plain.reading.undecided or not decided) else ("", plain)
    )
    reading, config = outcome.reading, outcome.reading.config
    counts = {fit: len(outcome.of(fit)) for fit in Fit}
    launched = () if decided or script or not scripts.launchers else _TOLD[:2]
    open_ = (*launched, *plain.reading.undecided)
    backend, strategy, precision = (
        "needs input" if field in launched or field in reading.undecided else value_at(config, field) for field in _TOLD
    )
    return FoundConfig(
        str(path),
        reading.format,
        backend,
        strategy,
        precision,
        counts,
        _status(outcome),
        open_,
        script,
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


class _Launching(NamedTuple):
    """A line that starts a training."""

    place: str
    """What `--with` names."""
    line: LaunchLine


class LaunchScripts:
    """The launch scripts and pages of a project, looked for when a config needs one.

    Args:
        scripts: Those that may be one.
        configs: Those that may be a config of Accelerate.
    """

    suffixes = _SCRIPTS

    def __init__(self, scripts: Iterator[Path], configs: Iterator[Path]) -> None:
        self._scripts, self._configs = scripts, configs

    def filling(self, path: Path, to: str, plain: Outcome) -> tuple[str, Outcome]:
        """The first that starts a training with this config and does not contradict it, and the translation with it."""
        for place in dict.fromkeys(self._places(path)):
            try:
                found = translate(path, to, with_=place)
            except ConfigError:
                continue
            if len(found.of(Fit.UNSUPPORTED)) <= len(plain.of(Fit.UNSUPPORTED)):
                return place, found
        return "", plain

    def _places(self, path: Path) -> Iterator[str]:
        """Lines that name the config itself, then those whose name has a placeholder, then scripts that name it
        anywhere.
        """
        lines = [one for one in self._lines if _names(one, path)]
        yield from (one.place for one in lines if any(path.name in word.text for word in _words(one.line)))
        yield from (one.place for one in lines)
        yield from (
            str(script) for script, text in self._texts.items() if path.name in text and script.suffix not in PAGES
        )
        if len(self.launchers) == 1:
            yield from self.launchers

    @cached_property
    def launchers(self) -> list[str]:
        """The configs of Accelerate."""
        return [
            str(path) for path in self._configs if any(word in path.read_text(errors="replace") for word in _LAUNCHER)
        ]

    @cached_property
    def _texts(self) -> dict[Path, str]:
        return {path: script_text(path) for path in self._scripts}

    @cached_property
    def _lines(self) -> list[_Launching]:
        found = [(path, launch_lines(text)) for path, text in self._texts.items()]
        return [
            _Launching(f"{path}:{line.line}" if len(lines) > 1 else str(path), line)
            for path, lines in found
            for line in lines
        ]


def _words(line: LaunchLine) -> list[Word]:
    return [*line.options.values(), *line.arguments]


def _names(one: _Launching, path: Path) -> bool:
    recipe = recipe_named(one.line, one.place.rpartition(":")[0] or one.place)
    return bool(recipe and recipe.refers_to(path)) or any(
        names(word.text.rpartition("=")[2], path) for word in _words(one.line)
    )
