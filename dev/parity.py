"""Measures every cell of the conformance suite on both engines and writes docs/parity.md: `make parity`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

from unishard.contract.tolerances import TOLERANCES, Tolerance
from unishard.testing import conformance
from unishard.testing.cells import BACKENDS, STEPS, Cell
from unishard.testing.conformance import Deviation, Refusal
from unishard.testing.features import AREAS, FEATURES

_FIELDS = ("first_losses", "losses", "first_norm", "norms")
_READING = """\
Losses and norms are reported in fp32, in which neighboring numbers differ by up to 1.2e-7 (relative): 2e-7 is the last digit or two. In
fp32 the losses differ by that much, since each engine sums the same gradients in another order. A norm sums squares over all parameters,
shard by shard (and with another kernel even on one rank), so its last digits differ a little more. In bf16 and fp16 the first steps agree
as in fp32. Deviations of 1e-5 in losses or 1e-3 in norms come from such a last digit that rounded one weight to the neighboring 16-bit
number, 2^-8 (bf16) or 2^-11 (fp16) away. Plain torch shows the same deviations when its sums are reordered.
"""


class Failure(NamedTuple):
    """The result of a cell whose engine failed, so that the other cells' figures are not lost."""

    message: str


Answer = Deviation | Refusal | Failure
Figures = Mapping[tuple[str, Cell], Answer]
"""The result of each backend in each cell."""


def write(path: Path) -> None:
    """Measure every cell, on CUDA ranks if available, else on CPU ranks, and write the page.

    Raises:
        AssertionError: An engine failed in some cells; the page is written nevertheless and marks them.
    """
    figures = dict(_measured())
    path.write_text(page(figures), encoding="utf-8")
    broken = [
        f"{backend}, {cell}: {answer.message}"
        for (backend, cell), answer in figures.items()
        if isinstance(answer, Failure)
    ]
    if broken:
        raise AssertionError("\n".join(broken))


def _measured() -> Iterator[tuple[tuple[str, Cell], Answer]]:
    for backend in BACKENDS:
        for cell in conformance.cells():
            yield (backend, cell), _answer(backend, cell)
        sys.stderr.write(f"{backend}: {len(conformance.cells())} cells\n")


def _answer(backend: str, cell: Cell) -> Answer:
    try:
        answer = conformance.measure(backend, cell)
        return answer if isinstance(answer, Refusal) else conformance.compare(answer, conformance.expected(cell))
    except AssertionError as failure:
        return Failure(str(failure).strip())


def page(figures: Figures) -> str:
    """The page in Markdown."""
    blocks = [
        "# Parity\n",
        _introduction(),
        "## The worst cells\n",
        _READING,
        *_worst(figures),
        "## Declared gaps\n",
        *_gaps(figures),
        "## Every cell\n",
        "Largest relative deviation of the first three losses, of all losses, of the first gradient norm, and of all "
        "gradient norms.\n",
        *(block for area in AREAS for block in _area(area, figures)),
    ]
    return "\n".join(blocks).rstrip() + "\n"


def _introduction() -> str:
    count = torch.cuda.device_count()
    where = (
        "CPU, gloo" if not count else f"up to {count} ranks on {torch.cuda.get_device_name()}, more on CPU over gloo"
    )
    bounds = "\n".join(f"| {name} | {_bounds(bound)} | {bound.why} |" for name, bound in TOLERANCES.items())
    return (
        f"How far each engine is from plain single-process torch on the concatenated global batch, over {STEPS} "
        "updates. Written by\n"
        f"`make parity`: torch {version('torch').partition('+')[0]}, DeepSpeed "
        f"{version('deepspeed').partition('+')[0]}, {where}.\n"
        "A cell passes within these bounds, all relative:\n\n"
        "| compute | first 3 losses / all losses / first norm / all norms | why |\n|---|---|---|\n" + bounds + "\n"
    )


def _bounds(tolerance: Tolerance) -> str:
    return " / ".join(f"{getattr(tolerance, field):.0e}" for field in _FIELDS)


def _worst(figures: Figures) -> Iterator[str]:
    yield "| engine | compute | what | deviation | cell |\n|---|---|---|---|---|"
    rows = []
    for backend in BACKENDS:
        for precision in TOLERANCES:
            held = {
                cell: figure
                for (name, cell), figure in figures.items()
                if name == backend
                and cell.precision == precision
                and isinstance(figure, Deviation)
                and conformance.tolerance(backend, cell) is TOLERANCES[precision]
            }
            for field in _FIELDS if held else ():
                cell = max(held, key=lambda each: getattr(held[each], field))
                rows.append(
                    f"| {backend} | {precision} | {field.replace('_', ' ')} | {getattr(held[cell], field):.1e} | "
                    f"{cell} |"
                )
    yield "\n".join(rows) + "\n"


def _gaps(figures: Figures) -> Iterator[str]:
    yield (
        "Cells in which an engine exceeds the common bounds because of an upstream limitation, and their own bounds.\n"
    )
    gaps = [*conformance.GAPS, *(gap for feature in FEATURES.values() for gap in feature.gaps)]
    if not gaps:
        yield "None.\n"
        return
    yield "| engine | cells | bounds | measured | why |\n|---|---|---|---|---|"
    rows = []
    for gap in dict.fromkeys(gaps):
        inside = [
            figure
            for (backend, cell), figure in figures.items()
            if backend == gap.backend
            and isinstance(figure, Deviation)
            and conformance.tolerance(backend, cell) is gap.tolerance
        ]
        measured = (
            " / ".join(f"{max(getattr(figure, field) for figure in inside):.1e}" for field in _FIELDS)
            if inside
            else "not run"
        )
        rows.append(
            f"| {gap.backend} | {gap.model}, {gap.strategy}, {gap.precision} | {_bounds(gap.tolerance)} | {measured} "
            f"| {gap.tolerance.why} ([source]({gap.link})) |"
        )
    yield "\n".join(rows) + "\n"


def _area(area: str, figures: Figures) -> Iterator[str]:
    yield f"### {area.replace('_', ' ').capitalize()}\n"
    cells = [cell for cell in conformance.cells() if FEATURES[cell.feature] in AREAS[area]]
    for feature in AREAS[area]:
        if feature.about:
            yield f"- `{feature.name}`: {feature.about}"
    yield ""
    yield "| cell | " + " | ".join(BACKENDS) + " |\n|---|" + "---|" * len(BACKENDS)
    yield "\n".join(_row(cell, [figures[backend, cell] for backend in BACKENDS]) for cell in cells) + "\n"


def _row(cell: Cell, answers: Sequence[Answer]) -> str:
    return f"| {cell} | " + " | ".join(_shown(answer) for answer in answers) + " |"


def _shown(answer: Answer) -> str:
    if isinstance(answer, Failure):
        return "FAILED"
    if isinstance(answer, Refusal):
        return "refused: " + " ".join(answer.reason.split(": ", 1)[-1].split()).replace("|", "\\|")
    return " / ".join(f"{getattr(answer, field):.0e}" for field in _FIELDS)


def main(arguments: Sequence[str]) -> None:
    """Write the page to a path."""
    parser = argparse.ArgumentParser(description="Measure every cell on every engine and write the page.")
    parser.add_argument("path", type=Path)
    write(parser.parse_args(arguments).path)


if __name__ == "__main__":
    main(sys.argv[1:])
