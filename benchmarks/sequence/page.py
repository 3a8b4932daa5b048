"""Writes the tables of docs/performance.md from the results of a run. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.machine import about
from benchmarks.ratios import ranged
from dev.measured import Json, Measured
from dev.pages.markdown import line, table
from dev.ranks.judging import deviation

if TYPE_CHECKING:
    from benchmarks.sequence.measuring import Updates

__all__ = ["MEASURED", "line_of", "result_of", "section"]

REFERENCE, HALF = "ulysses", "half the length"
"""What the others are compared with; and the one that trains on other sequences."""
BOUND = 1e-6
"""Of the relative distance of two losses."""
_COLUMNS = ("engine", "training", "seconds", "relative to `ulysses`", "MiB of an update")


def result_of(engine: str, name: str, rounds: Sequence[dict[str, Updates]]) -> Json:
    """A candidate's figures, relative to those of `REFERENCE` in the same round."""
    own, reference = ([each[key] for each in rounds] for key in (name, REFERENCE))
    ratios = [
        statistics.median(one.seconds) / statistics.median(other.seconds)
        for one, other in zip(own, reference, strict=True)
    ]
    return {
        "engine": engine,
        "name": name,
        "seconds": statistics.median(second for each in own for second in each.seconds),
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "peak": own[0].peak,
        "deviation": None if name == HALF else deviation(own[0].losses, reference[0].losses),
    }


def section(results: Json) -> str:
    """The section's text."""
    longest = [(each["engine"], each["name"], f"{each['length']:,}") for each in results["longest"]]
    blocks = [
        about(results["machine"]),
        table(_COLUMNS, map(_row, results["cells"])),
        *(said(cell) for cell in results["cells"] if void(cell)),
    ]
    if longest:
        blocks += [
            f"The longest sequence whose update stays within {results['budget']} MiB beside the engine's state:",
            table(("engine", "training", "positions"), longest),
        ]
    return "\n\n".join(blocks)


def _row(cell: Json) -> tuple[str, ...]:
    ratio = "void" if void(cell) else ranged(cell, 2)
    return cell["engine"], cell["name"], f"{cell['seconds']:.2f}", ratio, str(cell["peak"] >> 20)


def void(cell: Json) -> bool:
    """Whether it did not train the same."""
    return cell["deviation"] is not None and not cell["deviation"] <= BOUND


def said(cell: Json) -> str:
    return (
        f"**Void**: {cell['name']} on {cell['engine']} does not train as `{REFERENCE}`: losses are "
        f"{cell['deviation']:.1e} apart."
    )


def line_of(cell: Json) -> str:
    """For the terminal."""
    return line(_row(cell)) + (f" {said(cell)}" if void(cell) else "")


MEASURED = Measured("sequence", "benchmarks/sequence/measured.json", {"docs/performance.md": section})
