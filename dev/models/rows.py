"""docs/models-tested.csv: a row for each model, made of the records of its runs."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dev.models import KINDS
from dev.models.case import Case
from dev.models.chunked import outcome_in_chunks
from dev.models.figures import BOUNDS, Record, deviation, precision_of
from dev.models.joint import outcome
from dev.models.runs import Run, runs_of

__all__ = ["COLUMNS", "ModelRow", "column_of", "read", "rows_of", "write", "write_column"]

COLUMNS: dict[str, tuple[str, Callable[[Sequence[Record]], str]]] = {
    "sequence": (", sequence by ", outcome),
    "chunked": ("loss in chunks", outcome_in_chunks),
    "experts": (", experts by ", outcome),
    "tensor": (", tensor by ", outcome),
}
"""Those of runs of their own: what the names of these contain, and what came of them."""
_FIGURES = [f"{precision} {name}" for precision, bounds in BOUNDS.items() for name in bounds]
_HEADER = ("kind", "model", *_FIGURES, "export", "errors", "failures", "plain torch", "cause", *COLUMNS)


class ModelRow(NamedTuple):
    """What came of the runs of a model."""

    kind: str
    name: str
    fp32: tuple[float, ...]
    """The largest figures of all runs, in the order of `BOUNDS`; none where no run has any."""
    bf16: tuple[float, ...]
    export: str
    """`equal`, or what is different; empty where nothing is exported."""
    errors: str
    """Errors of unishard that runs end with, a line each."""
    failures: str
    """Errors that are not unishard's."""
    plain: str
    """Where plain torch itself cannot compute."""
    cause: str
    """Why figures are beyond their bounds, or runs fail."""
    sequence: str = ""
    """What came of the runs with `parallel.sequence`: `models.joint.outcome`."""
    chunked: str = ""
    """What came of the run with `training.loss_chunk_tokens`: `models.chunked.compare`."""
    experts: str = ""
    """What came of the runs with `parallel.expert`, as of those with `parallel.sequence`; empty without experts."""
    tensor: str = ""
    """Likewise of those with `parallel.tensor`; empty for a model that comes without a plan."""


def column_of(record: Record) -> str:
    """The column of its own that a record is for; empty for one of the others."""
    return next((column for column, (text, _) in COLUMNS.items() if text in record["run"]), "")


def rows_of(records: Iterable[Record]) -> list[ModelRow]:
    """A row for each model that was played."""
    by_case: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_case[record["case"]].append(record)
    cases = [(kind.title, case) for kind in KINDS for case in kind.cases]
    return [
        _row(kind, case, by_case[case.name], list(runs_of(number)))
        for number, (kind, case) in enumerate(cases)
        if case.name in by_case
    ]


def _row(kind: str, case: Case, records: Sequence[Record], runs: Sequence[Run]) -> ModelRow:
    columns = {
        column: outcome_of([record for record in records if column_of(record) == column])
        for column, (_, outcome_of) in COLUMNS.items()
    }
    records = [record for record in records if not column_of(record)]
    ended = [record for record in records if "error" in record]
    return ModelRow(
        kind,
        case.name,
        *(_largest(records, precision) for precision in BOUNDS),
        export="; ".join(sorted({record["export"] for record in records if record.get("export")})),
        errors="\n".join(_messages("error", [record for record in ended if record["ours"]], runs)),
        failures="\n".join(_messages("error", [record for record in ended if not record["ours"]], runs)),
        plain="\n".join(_messages("plain", [record for record in records if "plain" in record], runs)),
        cause=case.known,
        **columns,
    )


def _largest(records: Sequence[Record], precision: str) -> tuple[float, ...]:
    good = [record for record in records if "losses" in record and precision_of(record) == precision]
    return deviation(good, precision) if good else ()


def _messages(name: str, records: Sequence[Record], runs: Sequence[Run]) -> Iterator[str]:
    """The first sentence of each message once, with the runs that end with it."""
    of = {str(run): run for run in runs}
    by_message: dict[str, list[Run]] = defaultdict(list)
    for record in records:
        sentence = re.split(r"\n|(?<=[a-z)])\. ", record[name], maxsplit=1)[0]
        by_message[sentence].append(of[record["run"]])
    started = [run for run in runs if not run.resumes]
    for text, some in by_message.items():
        yield f"{_where(some, started)}{text}"


def _where(some: Sequence[Run], runs: Sequence[Run]) -> str:
    """What the runs have in common that not all runs have."""
    common = []
    for place in range(3):
        values = {run[place] for run in some}
        if len(values) < len({run[place] for run in runs}):
            common.append(" and ".join(sorted(map(str, values))))
    if all(run.resumes for run in some):
        common.append("moved")
    return f"{', '.join(common)}: " if common else ""


def write(path: Path, rows: Iterable[ModelRow]) -> None:
    """Write rows into the file, in the order of the cases; those of other models stay."""
    lines: dict[str, Sequence[str]] = {}
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            lines = {line[1]: line for line in csv.reader(file)}
    for kind, name, fp32, bf16, *texts in rows:
        lines[name] = (kind, name, *_cells(fp32, "fp32"), *_cells(bf16, "bf16"), *texts)
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(_HEADER)
        table.writerows(lines[case.name] for each in KINDS for case in each.cases if case.name in lines)


def write_column(path: Path, column: str, records: Iterable[Record]) -> None:
    """Write one column of the file, of `COLUMNS`, and leave its other cells as they are."""
    by_case: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_case[record["case"]].append(record)
    _, of_column = COLUMNS[column]
    with path.open(encoding="utf-8", newline="") as file:
        lines = [*csv.DictReader(file, restval="")]
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, _HEADER, lineterminator="\n")
        table.writeheader()
        for line in lines:
            of_case = by_case.get(line["model"])
            table.writerow(line if of_case is None else line | {column: of_column(of_case)})


def _cells(figures: Sequence[float], precision: str) -> list[str]:
    return [f"{figure:.1e}" for figure in figures] or [""] * len(BOUNDS[precision])


def read(path: Path) -> list[ModelRow]:
    """Read the file."""
    with path.open(encoding="utf-8", newline="") as file:
        _, *lines = csv.reader(file)
    fp32, end = len(BOUNDS["fp32"]), len(_FIGURES)
    return [
        ModelRow(kind, name, _numbers(cells[:fp32]), _numbers(cells[fp32:end]), *cells[end:])
        for kind, name, *cells in lines
    ]


def _numbers(cells: Sequence[str]) -> tuple[float, ...]:
    return tuple(map(float, filter(None, cells)))
