"""Compare two runs: whether they agree, and where they differ first."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import Any, NamedTuple

from unishard.config.describe import shown
from unishard.contract.tolerances import TOLERANCES
from unishard.errors import BackendError
from unishard.tools.compare import modules
from unishard.tools.compare.distance import Distance, Divergence, distance_to, first_divergence
from unishard.tools.compare.golden import ComparedRun
from unishard.tools.compare.modules import Located

_WIDTH = 80


class FieldDifference(NamedTuple):
    """A field of the config with two values."""

    path: str
    found: Any
    expected: Any


class RunComparison(NamedTuple):
    """The result of one comparison."""

    found: ComparedRun
    expected: ComparedRun
    distance: Distance
    at: Divergence | None
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
        """The whole result as JSON values."""
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


def compare_runs(found: ComparedRun, expected: ComparedRun, compute: str) -> RunComparison:
    """Compare two runs.

    Args:
        found: The run.
        expected: What it should have given.
        compute: `precision.compute`, which decides the tolerances.

    Raises:
        BackendError: They have no step in common.
    """
    distance = distance_to(found.course, expected.course)
    if not distance.steps:
        raise BackendError(
            f"{found.name} and {expected.name} have no step in common; write the golden file with at least as many "
            "--steps"
        )
    at = first_divergence(found.course, expected.course, TOLERANCES[compute])
    return RunComparison(found, expected, distance, at, [] if at is None else list(_different(found, expected)))


def _different(found: ComparedRun, expected: ComparedRun) -> Iterator[FieldDifference]:
    for path, value in found.facts.items():
        if path in expected.facts and value != expected.facts[path]:
            yield FieldDifference(path, value, expected.facts[path])


def lines_of(comparison: RunComparison) -> Iterator[str]:
    """The result in 80 columns."""
    distance, at = comparison.distance, comparison.at
    names = f"{comparison.found.name} and {comparison.expected.name}"
    if at is None:
        norms = "" if distance.norm is None else f", of norms {distance.norm:.1e}"
        far = f"the largest relative difference of losses is {distance.loss:.1e}{norms}"
        yield from wrap(f"same: {names} in {distance.steps} steps; {far}", _WIDTH, subsequent_indent="  ")
        return
    values = (
        f"{at.name} is {at.found}, not {at.expected} (relative difference {at.relative:.1e}, allowed {at.allowed:.0e})"
    )
    yield from wrap(f"different: {names} at step {at.step}: {values}", _WIDTH, subsequent_indent="  ")
    for path, found, expected in comparison.fields:
        differs = (
            f"{path} is {shown(found)} in {comparison.found.name}, {shown(expected)} in {comparison.expected.name}"
        )
        yield from wrap(differs, _WIDTH, subsequent_indent="  ")
    for line in modules.lines_of(comparison.located):
        yield from wrap(line, _WIDTH, subsequent_indent="  ")
