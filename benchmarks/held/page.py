"""Writes the table of docs/sharding.md from the results of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dev.measured import Json, Measured
from dev.pages.markdown import table

__all__ = ["BOUND", "MEASURED", "distance", "line_of", "section"]

BOUND = 0.05
"""Of the distance of a planned figure from the counted one, relative to it."""


def section(results: Json) -> str:
    """The section's text."""
    cells = results["cells"]
    columns = list(dict.fromkeys((cell["engine"], cell["precision"]) for cell in cells))
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return (
        f"Counted with a Llama of {results['parameters']:,} parameters and AdamW on {results['ranks']} ranks "
        f"({versions}); the farthest of the {len(cells)} planned figures is "
        f"{max(map(distance, cells)):.1%} from what was counted.\n\n"
    ) + table(("strategy", "offload", *map(", ".join, columns)), _rows(cells, columns))


def distance(cell: Json) -> float:
    """Of what was planned from what was counted, relative to it."""
    return float(abs(cell["device"] + cell["host"] - cell["held"]) / cell["held"])


def _rows(cells: Sequence[Json], columns: Sequence[tuple[str, str]]) -> Iterator[tuple[str, ...]]:
    by_place: dict[tuple[str, str], dict[tuple[str, str], Json]] = {}
    for cell in cells:
        by_place.setdefault((cell["strategy"], cell["offload"]), {})[cell["engine"], cell["precision"]] = cell
    for (strategy, offload), found in by_place.items():
        yield f"`{strategy}`", offload, *(_figures(found[column]) if column in found else "" for column in columns)


def _figures(cell: Json) -> str:
    planned = f"{cell['device']:.2f} + {cell['host']:.2f}" if cell["host"] else f"{cell['device']:.2f}"
    return f"{cell['held']:.2f} ({planned})"


def line_of(cell: Json) -> str:
    """For the terminal."""
    return f"{cell['engine']} {cell['strategy']} {cell['offload']} {cell['precision']}: {_figures(cell)}"


MEASURED = Measured("held", "benchmarks/held/measured.json", {"docs/sharding.md": section})
