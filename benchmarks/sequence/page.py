"""Writes the tables of docs/performance.md from the results of a run. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.machine import about
from benchmarks.ratios import ranged
from dev.measured import Json, Measured
from dev.pages.markdown import line, table
from dev.ranks.judging import deviation

if TYPE_CHECKING:
    from benchmarks.sequence.measuring import Updates

__all__ = ["MEASURED", "OF_HYBRIDS", "REFERENCE", "Comparison", "line_of", "result_of", "section"]

HALF = "half the length"
"""The one that trains on other sequences."""


class Comparison(NamedTuple):
    """What candidates are compared with."""

    times: str
    losses: str


REFERENCE = Comparison("ulysses", "ulysses")
OF_HYBRIDS = Comparison(HALF, "heads")
_HYBRID = """\
A small Qwen3.5, three layers of gated delta rules and one of attention, whose recurrences are split by `heads` and by
`states`, relative to the same model on sequences of half the length; the losses must be the same by both:"""
BOUND = 1e-6
"""Of the relative distance of two losses."""


def result_of(
    engine: str, name: str, rounds: Sequence[dict[str, Updates]], reference_of: Comparison = REFERENCE
) -> Json:
    """A candidate's figures, relative to those of others in the same round."""
    own, reference = ([each[key] for each in rounds] for key in (name, reference_of.times))
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
        "deviation": None if name == HALF else deviation(own[0].losses, rounds[0][reference_of.losses].losses),
    }


def section(results: Json) -> str:
    """The section's text."""
    longest = [(each["engine"], each["name"], f"{each['length']:,}") for each in results["longest"]]
    blocks = _compared(results, REFERENCE)
    if longest:
        blocks += [
            f"The longest sequence whose update stays within {results['budget']} MiB beside the engine's state:",
            table(("engine", "training", "positions"), longest),
        ]
    if hybrid := results.get("hybrid"):
        blocks += [_HYBRID, *_compared(hybrid, OF_HYBRIDS)]
    return "\n\n".join(blocks)


def _compared(results: Json, reference: Comparison) -> list[str]:
    columns = ("engine", "training", "seconds", f"relative to `{reference.times}`", "MiB of an update")
    return [
        about(results["machine"]),
        table(columns, map(_row, results["cells"])),
        *(said(cell, reference) for cell in results["cells"] if void(cell)),
    ]


def _row(cell: Json) -> tuple[str, ...]:
    ratio = "void" if void(cell) else ranged(cell, 2)
    return cell["engine"], cell["name"], f"{cell['seconds']:.2f}", ratio, str(cell["peak"] >> 20)


def void(cell: Json) -> bool:
    """Whether it did not train the same."""
    return cell["deviation"] is not None and not cell["deviation"] <= BOUND


def said(cell: Json, reference: Comparison) -> str:
    return (
        f"**Void**: {cell['name']} on {cell['engine']} does not train as `{reference.losses}`: losses are "
        f"{cell['deviation']:.1e} apart."
    )


def line_of(cell: Json, reference: Comparison) -> str:
    """For the terminal."""
    return line(_row(cell)) + (f" {said(cell, reference)}" if void(cell) else "")


MEASURED = Measured("sequence", "benchmarks/sequence/measured.json", {"docs/performance.md": section})
