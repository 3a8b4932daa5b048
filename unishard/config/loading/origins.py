"""Where each value of a config was set."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from unishard.config import Config
from unishard.errors import ConfigError, Problem

Keys = tuple[str | int, ...]
"""Path of a value: mapping keys and list indexes, outermost first."""


class Origin(NamedTuple):
    """Where a value was set."""

    source: str
    """File name, `override`, or empty for a mapping."""
    line: int | None = None
    """Line number, from 1."""

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"

    @property
    def order(self) -> float:
        """Sort key: the line; places without a line come last."""
        return math.inf if self.line is None else self.line


OVERRIDE = Origin("override")


def file_error(name: Path | str, message: str, line: int | None = None) -> ConfigError:
    """The error of a whole file, or of one of its lines."""
    return ConfigError([Problem("", message, str(Origin(str(name), line)))])


class Origins:
    """The place of each value; a value that was not set has the place of its section."""

    def __init__(self, whole: Origin) -> None:
        self._places: dict[Keys, Origin] = {(): whole}

    def put(self, keys: Keys, place: Origin) -> None:
        """Record where a value was set, and drop what it replaces."""
        for known in [known for known in self._places if known[: len(keys)] == keys]:
            del self._places[known]
        self._places[keys] = place

    def add(self, keys: Keys, place: Origin) -> None:
        """Record where a value was first set."""
        self._places.setdefault(keys, place)

    def below(self, keys: Keys) -> Origins:
        """The places inside a section, by their paths in it."""
        inner = Origins(self.of(keys))
        inner._places |= {path[len(keys) :]: place for path, place in self._places.items() if path[: len(keys)] == keys}
        return inner

    def of(self, path: Keys | str) -> Origin:
        """Where the value at a path was set, or else its closest section."""
        keys: Keys = tuple(path.split(".")) if isinstance(path, str) else path
        while keys not in self._places:
            keys = keys[:-1]
        return self._places[keys]

    def describe(self, cfg: Config, path: str) -> str:
        """The origin of a field's value: `file:line`, `override`, `given` (by a mapping) or `default`."""
        section: object = cfg
        for name in path.split("."):
            if name not in section.model_fields_set:  # type: ignore[attr-defined]
                return "default"
            section = getattr(section, name)
        return str(self.of(path)) or "given"

    def locate(self, error: ConfigError) -> ConfigError:
        """Add the place of its field to each problem of an error."""
        return type(error)(
            [
                problem
                if problem.where or not problem.path
                else Problem(problem.path, problem.what, str(self.of(problem.path)))
                for problem in error.problems
            ]
        )
