"""Writes the tables of docs/performance.md from the results of a run. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.peers.page import about, deviation

if TYPE_CHECKING:
    from benchmarks.sequence.measuring import Updates

__all__ = ["BEGIN", "END", "NOT_RUN", "line_of", "result_of", "section"]

BEGIN, END = "<!-- sequence: written by benchmarks/sequence -->", "<!-- end of sequence -->"
NOT_RUN = "Not measured yet: `make bench ONLY=sequence` writes this section."
REFERENCE, HALF = "ulysses", "half the length"
"""What the others are compared with; and the one that trains on other sequences."""
BOUND = 1e-6
"""Of the relative distance of two losses."""

Json = dict[str, Any]


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
    if not results["cells"]:
        return NOT_RUN
    lines = [about(results["machine"]), "", *table(results["cells"])]
    lines += [f"\n{said(cell)}" for cell in results["cells"] if void(cell)]
    if results["longest"]:
        lines += [
            "",
            f"The longest sequence whose update stays within {results['budget']} MiB beside the engine's state:",
        ]
        lines += ["", "| engine | training | positions |", "|---|---|---|"]
        lines += [f"| {each['engine']} | {each['name']} | {each['length']:,} |" for each in results["longest"]]
    return "\n".join(lines)


def table(cells: Sequence[Json]) -> Iterator[str]:
    yield "| engine | training | seconds | relative to `ulysses` | MiB of an update |"
    yield "|---|---|---|---|---|"
    for cell in cells:
        ratio = "void" if void(cell) else f"{cell['ratio']:.2f} ({cell['low']:.2f} to {cell['high']:.2f})"
        yield f"| {cell['engine']} | {cell['name']} | {cell['seconds']:.2f} | {ratio} | {cell['peak'] >> 20} |"


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
    return list(table([cell]))[-1] + (f" {said(cell)}" if void(cell) else "")
