"""docs/parity.md: how far the engines are from plain torch, and the ten cells that are nearest to their bounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version

import torch

from dev.pages.markdown import table
from dev.parity.rows import FAILED, FIGURES, REFUSED, ParityRow
from unishard.contract.tolerances import TOLERANCES, Tolerance
from unishard.testing import conformance
from unishard.testing.cells import BACKENDS, STEPS
from unishard.testing.features import AREAS, FEATURES

_WORST = 10
_CELLS = {str(cell): cell for cell in conformance.cells()}
_OWN_BOUNDS = {
    f"{precision}, {area}": bound
    for area, features in AREAS.items()
    for feature in features
    for precision, bound in feature.tolerances.items()
    if bound is not TOLERANCES[precision]
}
"""Those of the features of an area."""
_TOP = """\
# Parity

How far each engine is from plain single-process torch on the concatenated global batch, over {steps} updates. Written by
`make parity`: {environment}.
All deviations are relative: the largest of the first three losses, of all losses, of the first gradient norm, and of all gradient norms.
A cell passes within these bounds:
"""
_READING = """\
Losses and norms are reported in fp32, in which neighboring numbers differ by up to 1.2e-7 (relative): 2e-7 is the last digit or two. In
fp32 the losses differ by that much, since each engine sums the same gradients in another order. A norm sums squares over all parameters,
shard by shard (and with another kernel even on one rank), so its last digits differ a little more. In bf16 and fp16 the first steps agree
as in fp32. Deviations of 1e-5 in losses or 1e-3 in norms come from such a last digit that rounded one weight to the neighboring 16-bit
number, 2^-8 (bf16) or 2^-11 (fp16) away. Plain torch shows the same deviations when its sums are reordered.
"""
_GAPS = "Cells in which an engine exceeds the common bounds because of an upstream limitation, and their own bounds."
_DATA = """\
[parity.csv](parity.csv) has all {cells} cells on each engine; {refused} are refused, and {failed} failed. The name of a cell says its
feature, model, strategy, micro-batches in a window, clipping, precision and number of ranks. The features:
"""


def environment() -> str:
    """What the cells are measured with."""
    torch_version, deepspeed_version = (version(name).partition("+")[0] for name in ("torch", "deepspeed"))
    count = torch.cuda.device_count()
    gpu = f"up to {count} ranks on {torch.cuda.get_device_name()}, more on CPU over gloo" if count else ""
    return f"torch {torch_version}, DeepSpeed {deepspeed_version}, {gpu or 'CPU, gloo'}"


def page(rows: Sequence[ParityRow], environment: str) -> str:
    """The page in Markdown."""
    bounds = [(name, *_figures(_bounds(bound)), bound.why) for name, bound in (TOLERANCES | _OWN_BOUNDS).items()]
    data = _DATA.format(
        cells=len(_CELLS),
        refused=sum(row.error.startswith(REFUSED) for row in rows),
        failed=sum(row.error.startswith(FAILED) for row in rows),
    )
    blocks = [
        _TOP.format(steps=STEPS, environment=environment),
        table(("compute", *FIGURES, "why"), bounds),
        "## The largest deviations",
        _READING,
        table(("engine", "compute", *FIGURES), largest(rows) + largest(rows, _OWN_BOUNDS)),
        f"The {_WORST} cells that are nearest to their bounds:",
        table(("engine", "cell", *FIGURES, "of the bound"), map(_near, _nearest(rows))),
        "## Declared gaps",
        _GAPS,
        _gaps(rows),
        "## Every cell",
        data,
        *_features(),
    ]
    return "\n\n".join(block.rstrip() for block in blocks) + "\n"


def largest(rows: Iterable[ParityRow], bounds: Mapping[str, Tolerance] = TOLERANCES) -> list[tuple[str, ...]]:
    """For each engine and precision, the largest figures of the cells with these bounds, by default the common ones."""
    measured = [row for row in rows if row.figures]
    lines = []
    for backend in BACKENDS:
        for precision, bound in bounds.items():
            figures = [row.figures for row in measured if row.engine == backend and _tolerance(row) is bound]
            if figures:
                lines.append((backend, precision, *_figures(map(max, zip(*figures, strict=True)), 1)))
    return lines


def _tolerance(row: ParityRow) -> Tolerance:
    return conformance.tolerance(row.engine, _CELLS[row.cell])


def _bounds(tolerance: Tolerance) -> tuple[float, ...]:
    return tolerance.first_losses, tolerance.losses, tolerance.first_norm, tolerance.norms


def _figures(figures: Iterable[float], digits: int = 0) -> tuple[str, ...]:
    return tuple(f"{figure:.{digits}e}" for figure in figures)


def _share(row: ParityRow) -> float:
    """How much of its bounds a row uses up, at most: above 1 it is beyond one."""
    return max(figure / bound for figure, bound in zip(row.figures, _bounds(_tolerance(row)), strict=True))


def _nearest(rows: Iterable[ParityRow]) -> list[ParityRow]:
    return sorted((row for row in rows if row.figures), key=_share, reverse=True)[:_WORST]


def _near(row: ParityRow) -> tuple[str, ...]:
    return row.engine, row.cell, *_figures(row.figures), f"{_share(row):.0%}"


def _gaps(rows: Sequence[ParityRow]) -> str:
    gaps = dict.fromkeys([*conformance.GAPS, *(gap for feature in FEATURES.values() for gap in feature.gaps)])
    lines = []
    for gap in gaps:
        inside = [
            row.figures
            for row in rows
            if row.engine == gap.backend and row.figures and _tolerance(row) is gap.tolerance
        ]
        measured = " / ".join(_figures(map(max, zip(*inside, strict=True)), 1)) if inside else "not run"
        bounds = " / ".join(_figures(_bounds(gap.tolerance)))
        cells = f"{gap.model}, {gap.strategy}, {gap.precision}"
        lines.append((gap.backend, cells, bounds, measured, f"{gap.tolerance.why} ([source]({gap.link}))"))
    return table(("engine", "cells", "bounds", "measured", "why"), lines) if lines else "None."


def _features() -> Iterator[str]:
    """What the features of each area are, but for those whose name says it."""
    for area, features in AREAS.items():
        described = [f"- `{feature.name}`: {feature.about}" for feature in features if feature.about]
        if described:
            yield f"**{area.replace('_', ' ').capitalize()}**"
            yield "\n".join(described)
