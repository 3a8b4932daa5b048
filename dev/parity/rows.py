"""docs/parity.csv: a row for each cell of the conformance suite on each engine."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

FIGURES = ("first 3 losses", "all losses", "first norm", "all norms")
_HEADER = ("engine", "cell", *FIGURES, "error")
REFUSED, FAILED = "refused: ", "failed: "
"""How an error begins: the engine does not support the cell, as its feature declares, or it does not train."""


class ParityRow(NamedTuple):
    """What came of a cell on an engine."""

    engine: str
    cell: str
    figures: tuple[float, ...] = ()
    """The largest relative deviations from plain torch, in the order of `FIGURES`; none if there is an error."""
    error: str = ""


def write(path: Path, rows: Iterable[ParityRow]) -> None:
    """Write the file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(_HEADER)
        for row in rows:
            # A row that was read and is written again stays as it was.
            figures = [f"{figure:.1e}".replace(".0e", "e") for figure in row.figures] or [""] * len(FIGURES)
            lines.writerow((row.engine, row.cell, *figures, row.error))


def read(path: Path) -> list[ParityRow]:
    """Read the file."""
    with path.open(encoding="utf-8", newline="") as file:
        _, *lines = csv.reader(file)
    return [
        ParityRow(engine, cell, tuple(map(float, filter(None, figures))), error)
        for engine, cell, *figures, error in lines
    ]
