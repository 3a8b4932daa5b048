"""What a backend's rules make of a config: the native config, and a report with one line for each field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from unishard.config import Config, value_at
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.render import render
from unishard.contract.rules import Fit, Rule
from unishard.errors import Problem, TranslationError


class Line(NamedTuple):
    """What became of one field."""

    path: str
    value: Any
    fit: Fit
    native: str
    note: str


@dataclass(frozen=True, slots=True)
class Report:
    """What became of every field, in the order of the schema."""

    lines: tuple[Line, ...]

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def of(self, fit: Fit) -> list[Line]:
        """The lines with this fit."""
        return [line for line in self.lines if line.fit is fit]


class Translation(NamedTuple):
    """A config in an engine's own words, and the report of how well it fits."""

    backend: str
    engine: str
    """Class that must run the model, such as `DeepSpeedEngine`; `prepare` checks that it does."""
    native: Native
    report: Report

    def check(self, *, strict: bool) -> Translation:
        """Return self if it may be run.

        Raises:
            TranslationError: A field is unsupported, or approximate under `strict`.
        """
        problems = [
            Problem(line.path, f"{line.value!r} is not supported by {self.backend}: {line.note}")
            for line in self.report.of(Fit.UNSUPPORTED)
        ]
        if strict:
            problems += [
                Problem(
                    line.path, f"{line.value!r} is only approximate on {self.backend}, and strict is true: {line.note}"
                )
                for line in self.report.of(Fit.APPROXIMATE)
            ]
        if problems:
            raise TranslationError(problems)
        return self


def apply(rules: Mapping[str, Rule], cfg: Config, topology: Topology) -> tuple[Native, Report]:
    """What a backend's rules make of a config: its native config and the report. Pure; imports no engine."""
    native, fields = render(rules, cfg, topology)
    lines = (Line(path, value_at(cfg, path), one.fit, one.key, one.note) for path, one in fields.items())
    return native, Report(tuple(lines))
