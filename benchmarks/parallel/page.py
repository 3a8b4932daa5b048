"""Writes the tables of docs/tensor.md and docs/experts.md from the results of a run. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.machine import about
from benchmarks.ratios import paired, ranged
from dev.measured import Json, Measured
from dev.pages.markdown import line, table
from dev.ranks.judging import deviation

if TYPE_CHECKING:
    from benchmarks.peers.turns import Side

__all__ = ["MEASURED", "line_of", "results_of", "section"]

BOUND = 1e-5
"""Of the relative distance of two losses."""
_COLUMNS = ("training", "seconds relative to `full_shard`", "MiB held", "MiB of a step", "collectives", "MiB sent")


def results_of(sides: Mapping[str, Side]) -> Iterator[Json]:
    """The candidates' figures; times relative to plain sharding on the same engine, else on the first one."""
    plain = [name for name in sides if name.startswith("full_shard")]
    for name, side in sides.items():
        beside = next((each for each in plain if each.rpartition(" ")[2] == name.rpartition(" ")[2]), plain[0])
        yield {
            "name": name,
            "seconds": statistics.median(side.seconds),
            **paired(side.seconds, sides[beside].seconds),
            "held": side.held,
            **side.counts._asdict(),
            "deviation": deviation(side.losses, sides[plain[0]].losses),
        }


def section(key: str, results: Json) -> str:
    """The part of a page."""
    cells = results[key]
    return "\n\n".join(
        [
            about(results["machine"]),
            table(_COLUMNS, map(_row, cells)),
            *(
                f"**Void**: {cell['name']} does not train the same: losses are {cell['deviation']:.1e} apart."
                for cell in cells
                if _void(cell)
            ),
        ]
    )


def _void(cell: Json) -> bool:
    return not cell["deviation"] <= BOUND


def _row(cell: Json) -> tuple[str, ...]:
    ratio = "void" if _void(cell) else ranged(cell, 2)
    sizes = (f"{cell[name] / 2**20:.1f}" for name in ("held", "peak"))
    return cell["name"], ratio, *sizes, str(cell["collectives"]), f"{cell['nbytes'] / 2**20:.1f}"


def line_of(cell: Json) -> str:
    """For the terminal."""
    return f"{line(_row(cell))} {cell['seconds']:.3f} s, losses {cell['deviation']:.1e} apart"


MEASURED = Measured(
    "parallel",
    "benchmarks/parallel/measured.json",
    {"docs/tensor.md": partial(section, "tensor"), "docs/experts.md": partial(section, "expert")},
)
