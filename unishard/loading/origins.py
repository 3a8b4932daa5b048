"""Remembers where each value of a config was written."""

from __future__ import annotations

import math
from typing import NamedTuple

from unishard.config import Config
from unishard.errors import ConfigError, Problem

__all__ = ["OVERRIDE", "Keys", "Origin", "Origins"]

Keys = tuple[str | int, ...]
"""Path of a value: keys of mappings and positions in lists, outermost first."""


class Origin(NamedTuple):
    """Where a value was written."""

    source: str
    """Name of the file, `override`, or empty for a mapping."""
    line: int | None = None
    """Line in the file, from 1."""

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"

    @property
    def order(self) -> float:
        """Sorts by line; what has none comes last."""
        return math.inf if self.line is None else self.line


OVERRIDE = Origin("override")


class Origins:
    """The place of each value; one that was not written has the place of the section around it."""

    def __init__(self, whole: Origin) -> None:
        self._places: dict[Keys, Origin] = {(): whole}

    def put(self, keys: Keys, place: Origin) -> None:
        """Note where a value was written, and forget what it replaces."""
        for known in [known for known in self._places if known[: len(keys)] == keys]:
            del self._places[known]
        self._places[keys] = place

    def add(self, keys: Keys, place: Origin) -> None:
        """Note where a value was first written."""
        self._places.setdefault(keys, place)

    def of(self, path: Keys | str) -> Origin:
        """Where the value at a path was written, or the nearest one around it."""
        keys: Keys = tuple(path.split(".")) if isinstance(path, str) else path
        while keys not in self._places:
            keys = keys[:-1]
        return self._places[keys]

    def describe(self, cfg: Config, path: str) -> str:
        """Where a leaf of the config got its value from: `file:line`, `override`, `given` (by a mapping) or `default`."""
        section: object = cfg
        for name in path.split("."):
            if name not in section.model_fields_set:  # type: ignore[attr-defined]
                return "default"
            section = getattr(section, name)
        return str(self.of(path)) or "given"

    def locate(self, error: ConfigError) -> ConfigError:
        """The same error, each problem with the place of its field."""
        return type(error)(
            [
                problem if problem.where or not problem.path else Problem(problem.path, problem.what, str(self.of(problem.path)))
                for problem in error.problems
            ]
        )
