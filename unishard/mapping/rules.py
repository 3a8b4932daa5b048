"""A mapping is a table: one `Rule` for each leaf of the config, and what each table makes of a given config.

A backend writes its rules as data. From the same rows come the native config, the report, `unishard explain` and MAPPING.md,
so none of them can say something else than another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from unishard.config import Config, value_at
from unishard.config.topology import Topology
from unishard.errors import Problem, TranslationError

__all__ = ["SAVING", "Fit", "Line", "Report", "Rule", "Translation", "When", "apply", "flat", "idle", "loop", "merge", "nested"]

Native = dict[str, Any]
Setting = Callable[[Config, Topology], Native]


class Fit(StrEnum):
    """How well a backend keeps what a field asks for."""

    EXACT = "exact"
    """Same maths, same collectives."""
    EQUIVALENT = "equivalent"
    """Same maths to rounding; other collectives or memory, or unishard's loop does it around the engine."""
    APPROXIMATE = "approximate"
    """Same purpose, another trade-off. Reported; an error under `strict: true`."""
    UNSUPPORTED = "unsupported"
    """Cannot be had. Refused."""


@dataclass(frozen=True, slots=True)
class When:
    """A case in which a rule fits differently."""

    case: str
    """The condition in words, for MAPPING.md."""
    holds: Callable[[Config], bool]
    fit: Fit
    note: str
    """How it differs; for `unsupported`: why, and after a semicolon what instead."""


def idle(case: str, holds: Callable[[Config], bool], note: str) -> When:
    """A case in which the field has nothing to decide, so that nothing can be lost."""
    return When(case, holds, Fit.EXACT, note)


@dataclass(frozen=True, slots=True)
class Rule:
    """What one backend makes of one field."""

    fit: Fit
    native: str
    """The native keys or calls, in words, for people."""
    note: str = ""
    to: Setting = lambda cfg, topology: {}
    """The fragment of native config that the field decides; fragments are merged."""
    when: tuple[When, ...] = ()
    """Exceptions, the first that holds counts."""

    def verdict(self, cfg: Config) -> tuple[Fit, str]:
        """The fit and the note for this config."""
        for case in self.when:
            if case.holds(cfg):
                return case.fit, case.note
        return self.fit, self.note


def loop(note: str, *when: When) -> Rule:
    """A rule for a field that unishard's own loop honours, the same way around every engine."""
    return Rule(Fit.EXACT, "unishard's loop", note, when=when)


SAVING: Mapping[str, Rule] = {
    "checkpoint.dir": loop("each rank writes the parts that it holds, under the names that parameters have in the model"),
    "checkpoint.every_steps": loop("counts updates, at the end of a window"),
    "checkpoint.every_minutes": loop("by the clock of rank 0, at the end of a window"),
    "checkpoint.keep_last": loop("deletes after a newer checkpoint is complete"),
    "checkpoint.keep_every": loop("part of the same"),
    "checkpoint.async_save": loop("copies to host memory, and a thread writes"),
    "checkpoint.on_signal": loop("the ranks agree at the end of a window; exit code 85"),
}
"""Rows of every backend that supplies its engine's state, since the saving itself is the same around all of them."""


@dataclass(frozen=True, slots=True)
class Line:
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


@dataclass(frozen=True, slots=True)
class Translation:
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
                Problem(line.path, f"{line.value!r} is only approximate on {self.backend}, and strict is true: {line.note}")
                for line in self.report.of(Fit.APPROXIMATE)
            ]
        if problems:
            raise TranslationError(problems)
        return self


def apply(rules: Mapping[str, Rule], cfg: Config, topology: Topology) -> tuple[Native, Report]:
    """What a backend's rules make of a config: its native config and the report. Pure; imports no engine."""
    native: Native = {}
    lines = []
    for path, rule in rules.items():
        fit, note = rule.verdict(cfg)
        lines.append(Line(path, value_at(cfg, path), fit, rule.native, note))
        if fit is not Fit.UNSUPPORTED:
            native = merge(native, rule.to(cfg, topology))
    return native, Report(tuple(lines))


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Native:
    """A new nested dict: `base` with `over` on top, dicts merged key by key, everything else replaced."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def flat(native: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a nested native config, each with its dotted key."""
    for key, value in native.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nested(settings: Mapping[str, Any]) -> Native:
    """Dotted keys as nested dicts, the inverse of `flat`."""
    native: Native = {}
    for key, value in settings.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        native = merge(native, value)
    return native
