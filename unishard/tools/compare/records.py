"""What a run has logged: the records of `log.jsonl`, one for each optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from unishard.tools.compare.log_lines import lines_in

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
