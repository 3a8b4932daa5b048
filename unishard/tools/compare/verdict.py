"""Whether two runs agree, and what to say where they do not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

from unishard.config import Config
from unishard.config.nested import flat
from unishard.contract.tolerances import TOLERANCES
from unishard.errors import BackendError, ConfigError, Problem
from unishard.tools.compare import modules
from unishard.tools.compare import records as logged
from unishard.tools.compare.modules import Located, module_lines

# -- Golden files: what a run has given at each step, and the config that decided it ---------------

_AROUND = ("launch", "logging", "profile", "checkpoint", "backend", "sharding", "communication", "strict")
"""Sections that do not change what is trained."""
_LARGEST_FILE = 2**28
"""Bytes of a golden file; a line has about 300."""


class ComparedRun(NamedTuple):
    """One side of a comparison."""

    name: str
    course: logged.Course
    facts: Mapping[str, Any]
    """The fields of the config that decide what is trained; empty where they are not known."""


def facts_of(cfg: Config) -> dict[str, Any]:
    """The fields that decide what is trained, by their paths."""
    dumped = cfg.model_dump(mode="json")
    return dict(flat({name: section for name, section in dumped.items() if name not in _AROUND}))


def golden_text(records: Sequence[logged.Record], cfg: Config, modules: str = "") -> str:
    """A golden file: a line with the config, then one for each step, then those of its modules.

    Args:
        records: The steps.
        cfg: The config.
        modules: The text of `modules.jsonl`, if modules were measured.
    """
    course = logged.Course.of(records)
    lines: list[dict[str, Any]] = [{"unishard_golden": 1, "config": facts_of(cfg)}]
    rows = zip(course.steps, course.losses, course.norms, course.lrs, course.samples, strict=True)
    lines += [
        {"step": step, "loss": loss, "grad_norm": norm, "lr": lr, "samples": samples}
        for step, loss, norm, lr, samples in rows
    ]
    return "".join(json.dumps(line) + "\n" for line in lines) + module_lines(modules)


def read_golden(path: Path) -> ComparedRun:
    """Read a golden file, or a `log.jsonl` of a run.

    Raises:
        ConfigError: It has no losses.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ConfigError(
            [Problem("", f"cannot be opened ({error.strerror}); name a golden file, or a log.jsonl", str(path))]
        ) from None
    if size > _LARGEST_FILE or not path.is_file():
        raise ConfigError(
            [Problem("", f"is no file of at most {_LARGEST_FILE} bytes; name a golden file, or a log.jsonl", str(path))]
        )
    text = path.read_text(encoding="utf-8", errors="replace")
    records = logged.records_in(text)
    if not records:
        what = (
            'has no losses; write it with --write-golden, or name a log.jsonl: lines such as {"step": 1, "loss": 2.5}'
        )
        raise ConfigError([Problem("", what, str(path))])
    return ComparedRun(path.name, logged.Course.of(records), _config_in(text))


def _config_in(text: str) -> dict[str, Any]:
    try:
        first = json.loads(text.splitlines()[0])
    except (ValueError, RecursionError):
        return {}
    found = first.get("config") if isinstance(first, dict) else None
    return found if isinstance(found, dict) else {}


# -- What two runs differ in ----------------------------------------------------------------------

_WIDTH = 80


class FieldDifference(NamedTuple):
    """A field of the config with two values."""

    path: str
    found: Any
    expected: Any


class Verdict(NamedTuple):
    """The result of one comparison."""

    found: ComparedRun
    expected: ComparedRun
    distance: logged.Distance
    at: logged.Divergence | None
    """The first difference; None if they agree."""
    fields: list[FieldDifference]
    """The fields of the config that decide what is trained and differ, if the runs differ and both configs are
    known."""
    located: Located = Located()
    """The first module that differs."""

    @property
    def same(self) -> bool:
        """Whether all common steps agree within the tolerances."""
        return self.at is None

    def as_json(self) -> dict[str, Any]:
        """All that is known."""
        return {
            "run": self.found.name,
            "expected": self.expected.name,
            "same": self.same,
            "distance": self.distance._asdict(),
            "first_difference": None if self.at is None else self.at._asdict(),
            "fields": [field._asdict() for field in self.fields],
            "first_module": None if self.located.first is None else self.located.first._asdict(),
            "notes": list(self.located.notes),
        }


def verdict_of(found: ComparedRun, expected: ComparedRun, compute: str) -> Verdict:
    """Compare two runs.

    Args:
        found: The run.
        expected: What it should have given.
        compute: `precision.compute`, which decides the tolerances.

    Raises:
        BackendError: They have no step in common.
    """
    distance = logged.distance_to(found.course, expected.course)
    if not distance.steps:
        raise BackendError(
            f"{found.name} and {expected.name} have no step in common; write the golden file with at least as many "
            "--steps"
        )
    at = logged.first_divergence(found.course, expected.course, TOLERANCES[compute])
    return Verdict(found, expected, distance, at, [] if at is None else list(_different(found, expected)))


def _different(found: ComparedRun, expected: ComparedRun) -> Iterator[FieldDifference]:
    for path, value in found.facts.items():
        if path in expected.facts and value != expected.facts[path]:
            yield FieldDifference(path, value, expected.facts[path])


def lines_of(verdict: Verdict) -> Iterator[str]:
    """A verdict in 80 columns."""
    distance, at = verdict.distance, verdict.at
    names = f"{verdict.found.name} and {verdict.expected.name}"
    if at is None:
        norms = "" if distance.norm is None else f", of norms {distance.norm:.1e}"
        far = f"the largest relative difference of losses is {distance.loss:.1e}{norms}"
        yield from wrap(f"same: {names} in {distance.steps} steps; {far}", _WIDTH, subsequent_indent="  ")
        return
    values = (
        f"{at.name} is {at.found}, not {at.expected} (relative difference {at.relative:.1e}, allowed {at.allowed:.0e})"
    )
    yield from wrap(f"different: {names} at step {at.step}: {values}", _WIDTH, subsequent_indent="  ")
    for path, found, expected in verdict.fields:
        differs = f"{path} is {_shown(found)} in {verdict.found.name}, {_shown(expected)} in {verdict.expected.name}"
        yield from wrap(differs, _WIDTH, subsequent_indent="  ")
    for line in modules.lines_of(verdict.located):
        yield from wrap(line, _WIDTH, subsequent_indent="  ")


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
