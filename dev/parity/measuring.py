"""Trains every cell of the conformance suite on both engines."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator

from dev.parity.rows import FAILED, REFUSED, ParityRow
from unishard.testing import conformance
from unishard.testing.cells import BACKENDS, Cell
from unishard.testing.conformance import Refusal


def measured(known: Iterable[ParityRow] = (), features: Collection[str] = ()) -> Iterator[ParityRow]:
    """What came of each cell, on CUDA ranks if available, else on CPU ranks.

    Args:
        known: What came of cells before.
        features: Measure only the cells of these, and those that are not known.
    """
    before = {(row.engine, row.cell): row for row in known}
    cells = conformance.cells()
    for backend in BACKENDS:
        rows = {cell: before.get((backend, str(cell))) for cell in cells if cell.feature not in features}
        together = [cell for cell in cells if not rows.get(cell)] if before else []
        for cell in cells:
            yield rows.get(cell) or _row(backend, cell, together)
        sys.stderr.write(f"{backend}: {len(cells)} cells\n")


def _row(backend: str, cell: Cell, together: Collection[Cell]) -> ParityRow:
    try:
        answer = conformance.measure(backend, cell, together)
        if isinstance(answer, Refusal):
            return ParityRow(backend, str(cell), error=REFUSED + " ".join(answer.reason.split(": ", 1)[-1].split()))
        deviation = conformance.compare(answer, conformance.expected(cell, together))
    except AssertionError as failure:
        return ParityRow(backend, str(cell), error=FAILED + str(failure).strip())
    return ParityRow(
        backend, str(cell), (deviation.first_losses, deviation.losses, deviation.first_norm, deviation.norms)
    )
