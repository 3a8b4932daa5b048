"""Writes the table of docs/performance.md from the results of a run. Pure, but for the page itself."""

from __future__ import annotations

import statistics
import textwrap
from typing import Any

from benchmarks.frameworks.turns import Side
from benchmarks.machine import about
from benchmarks.ratios import paired, ranged
from dev.measured import Json, Measured
from dev.pages.markdown import line, table
from dev.ranks.judging import deviation

__all__ = ["COLUMNS", "GOAL", "MEASURED", "line_of", "result_of", "section", "sentence"]

GOAL = 1.0
"""At most so long is an update on unishard, relative to the framework's own: the median of the cells."""
BOUND = 1e-6
"""Of the relative distance of two losses."""
COMPARED = 20
"""The losses of so many updates, as in the conformance suite: later, rounding of sums grows with each update."""
NAMES = {"accelerate": "Accelerate", "trainer": "Trainer", "lightning": "Lightning's Trainer", "fabric": "Fabric"}
COLUMNS = (
    *("framework", "engine", "strategy", "own, ms", "unishard, ms", "unishard / own", "pairs"),
    *("calls, own", "calls, unishard", "of them unishard's"),
)


def result_of(case: Any, ranks: list[dict[str, Side]]) -> Json:
    """A case from what its ranks gave."""
    first = ranks[0]
    return {
        "framework": case.model,
        "engine": case.engine,
        "strategy": case.strategy,
        "deviation": max(
            deviation(rank["unishard"].losses[:COMPARED], rank["own"].losses[:COMPARED]) for rank in ranks
        ),
        "updates": len(first["own"].losses),
        "seconds": {name: statistics.median(side.seconds) for name, side in first.items()},
        "calls": {name: side.calls.everything for name, side in first.items()},
        "ours": first["unishard"].calls.own.total(),
        **paired(first["unishard"].seconds, first["own"].seconds),
    }


def section(results: Json) -> str:
    """The section's text."""
    cells = results["cells"]
    ratios, usable = sorted(cell["ratio"] for cell in cells if not void(cell)), [c for c in cells if not void(c)]
    lines = [about(results["machine"]), ""]
    if usable:
        met, sure = sum(each <= GOAL for each in ratios), sum(cell["low"] > GOAL for cell in usable)
        fewer = sum(cell["calls"]["unishard"] <= cell["calls"]["own"] for cell in usable)
        lines += [
            f"- The median of {len(usable)} cells is {statistics.median(ratios):.3f}. An update takes at most "
            f"{GOAL:.2f} x the framework's own in {met} of them; in {sure} the whole interval is above.",
            f"- It makes at most as many Python calls in {fewer} of {len(usable)}.",
            f"- The losses of the first {COMPARED} updates are those of the framework's own run to "
            f"{max(cell['deviation'] for cell in usable):.0e}.",
            "",
        ]
    lines += [table(COLUMNS, map(_row, cells)), *(f"\n{said(cell)}" for cell in cells if void(cell))]
    return "\n".join(lines)


def sentence(results: Json) -> str:
    """README's sentence: the median and the range over the cells."""
    ratios = sorted(cell["ratio"] for cell in results["cells"] if not void(cell))
    return textwrap.fill(
        f"Inside Accelerate, the Trainer, Lightning and Fabric it takes {statistics.median(ratios):.2f} times as long "
        f"as the framework's own (median of {len(ratios)} cells; {ratios[0]:.2f} to {ratios[-1]:.2f}).",
        88,
    )


def _row(cell: Json) -> tuple[str, ...]:
    own, ours = (f"{cell['seconds'][side] * 1e3:.1f}" for side in ("own", "unishard"))
    calls = (str(cell["calls"][side]) for side in ("own", "unishard"))
    ratio = "" if void(cell) else ranged(cell, 3)
    parts = [NAMES[cell["framework"]], cell["engine"], f"`{cell['strategy']}`", own, ours, ratio]
    return *parts, str(cell["pairs"]), *calls, str(cell["ours"])


def void(cell: Json) -> bool:
    """Whether the two sides did not train the same."""
    return not cell["deviation"] <= BOUND


def said(cell: Json) -> str:
    return (
        f"**Void**: {NAMES[cell['framework']]} on {cell['engine']} with `{cell['strategy']}` does not train as its own "
        f"run: losses are {cell['deviation']:.1e} apart."
    )


def line_of(cell: Json) -> str:
    """For the terminal."""
    return line(_row(cell)) + (f" {said(cell)}" if void(cell) else "")


MEASURED = Measured(
    "frameworks", "benchmarks/frameworks/measured.json", {"docs/performance.md": section, "README.md": sentence}
)
