"""What a run has logged: the records of `log.jsonl`, one for each optimizer step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from unishard.contract.tolerances import Tolerance

# -- Lines that a run has logged, from a file that may be damaged or written by something else -----

_LARGEST = 2**63
"""No step and no value is as large."""
_NAMES = ("module", "parameter")
"""What is text."""


def lines_in(text: str) -> Iterator[dict[str, Any]]:
    """The lines with a step, whose other values are numbers; others, such as a last half one, are left out."""
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if (
            isinstance(found, dict)
            and isinstance(found.get("step"), int)
            and all(map(_is_sound, found, found.values()))
        ):
            yield found


def _is_sound(name: str, value: Any) -> bool:
    if name in _NAMES:
        return isinstance(value, str)
    if isinstance(value, float):
        return not math.isinf(value)
    return value is None or (isinstance(value, int) and abs(value) < _LARGEST)


Record = Mapping[str, Any]
"""Numbers by name; None where JSON has none, as for NaN."""


def records_in(text: str) -> list[Record]:
    """The records of a file's text, in order of their steps; lines that are no record, such as a last half one, are
    left out.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for record in lines_in(text):
        if not record.keys() & {"module", "parameter"}:
            by_step.setdefault(record["step"], {}).update(record)
    return [by_step[step] for step in sorted(by_step) if "loss" in by_step[step]]


def read_records(path: Path) -> list[Record]:
    """The records of a file; none if it is not there yet."""
    return records_in(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else []


def middle(records: Sequence[Record], name: str) -> float | None:
    """The median of a value; None where it was not logged."""
    values = [record[name] for record in records if record.get(name) is not None]
    return median(values) if values else None


class Course(NamedTuple):
    """What a training gave at each step."""

    steps: tuple[int, ...]
    losses: tuple[float | None, ...]
    norms: tuple[float | None, ...]
    """Before clipping."""
    lrs: tuple[float | None, ...]
    samples: tuple[int | None, ...]
    """Of an optimizer step, over all ranks."""

    @classmethod
    def of(cls, records: Sequence[Record]) -> Course:
        """The curve of records."""

        def column(name: str) -> tuple[Any, ...]:
            return tuple(record.get(name) for record in records)

        return cls(column("step"), column("loss"), column("grad_norm"), column("lr"), tuple(map(_samples, records)))


def _samples(record: Record) -> int | None:
    """The samples of a step: given in a golden file, else what was measured."""
    rate, seconds = record.get("samples_per_second"), record.get("step_seconds")
    known = record.get("samples")
    return (
        known
        if known is not None or not rate or not seconds or not math.isfinite(rate * seconds)
        else round(rate * seconds)
    )


# -- How far two runs of the same steps are from each other. Pure ----------------------------------

_FIRST = 3
"""Losses that `Tolerance.first_losses` bounds."""
_RATES = 1e-6
"""Relative difference of learning rates that is rounding."""


class Distance(NamedTuple):
    """The largest relative differences over all common steps; None where a value is missing."""

    loss: float | None
    norm: float | None
    steps: int


class Divergence(NamedTuple):
    """The first value beyond its tolerance."""

    step: int
    name: str
    """`loss`, `grad_norm` or `lr`."""
    found: float | None
    expected: float | None
    allowed: float

    @property
    def relative(self) -> float:
        """The relative difference."""
        return relative(self.found, self.expected)


def relative(one: float | None, other: float | None) -> float:
    """The relative difference; None is NaN or infinite, which equals only itself."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    return abs(one - other) / max(abs(other), 1e-12)


def distance_to(found: Course, expected: Course) -> Distance:
    """Compare all common steps."""
    pairs = list(_pairs(found, expected))
    losses = [relative(found.losses[one], expected.losses[other]) for one, other in pairs]
    norms = [
        relative(found.norms[one], expected.norms[other]) for one, other in pairs if expected.norms[other] is not None
    ]
    return Distance(max(losses, default=None), max(norms, default=None), len(pairs))


def first_divergence(found: Course, expected: Course, tolerance: Tolerance) -> Divergence | None:
    """The first value beyond its tolerance, by step and then loss, norm, learning rate; None if there is none."""
    for turn, (one, other) in enumerate(_pairs(found, expected)):
        values = (
            (
                "loss",
                found.losses[one],
                expected.losses[other],
                tolerance.first_losses if turn < _FIRST else tolerance.losses,
            ),
            ("grad_norm", found.norms[one], expected.norms[other], tolerance.norms if turn else tolerance.first_norm),
            ("lr", found.lrs[one], expected.lrs[other], _RATES),
        )
        for name, left, right, allowed in values:
            # A golden file may lack norms and rates.
            if not (name != "loss" and right is None) and relative(left, right) > allowed:
                return Divergence(found.steps[one], name, left, right, allowed)
    return None


def _pairs(found: Course, expected: Course) -> Iterator[tuple[int, int]]:
    """Positions of the common steps in both."""
    at = {step: position for position, step in enumerate(expected.steps)}
    return ((position, at[step]) for position, step in enumerate(found.steps) if step in at)
