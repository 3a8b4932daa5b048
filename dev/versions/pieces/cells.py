"""Holds both engines to plain torch on a spanning part of the conformance suite. Run in the environment:
`cells.py OUT.json`."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from unishard.errors import UnishardError
from unishard.testing import conformance, run_ranks
from unishard.testing.cells import BACKENDS, CLIP, STEPS, Cell, windows
from unishard.testing.conformance import Refusal
from unishard.testing.features import AREAS, FEATURES

SECONDS = 30.0
"""For one cell."""


def spanning() -> list[Cell]:
    """Every model, strategy and precision of the plain loop on 2 ranks, the hybrid strategies on 4, and one cell of
    every other area."""
    suite = conformance.suite()
    lengths = {"mlp": (3, CLIP), "llama": (1, None)}
    plain = [
        cell
        for cell in conformance.plain_cells()
        if cell.world == 2 and lengths[cell.model] == (cell.accumulation, cell.clip)
    ]
    hybrid = [cell for cell in FEATURES["hybrid"].cells() if cell.precision == "fp32"]
    firsts = [features[0] for area, features in AREAS.items() if area not in ("plain", "sharding")]
    others = [
        replace(
            next(c for c in suite if (c.feature, c.strategy, c.world) == (each.name, each.strategies[-1], 2)),
            steps=STEPS,
        )
        for each in firsts
    ]
    return [*plain, *hybrid, *others]


def main(out: Path) -> None:
    wanted = sorted(spanning(), key=_group)
    found: dict[str, dict[str, Any]] = {backend: {} for backend in BACKENDS}
    for _, group in groupby(wanted, _group):
        cells = list(group)
        references = _attempt(1, cells, reference)
        for backend in BACKENDS:
            answers = _attempt(cells[0].world, cells, measure, backend)
            found[backend] |= {str(cell): judge(backend, cell, answers[cell], references[cell]) for cell in cells}
    out.write_text(json.dumps(found), encoding="utf-8")


def _group(cell: Cell) -> tuple[str, int]:
    """Cells that share processes."""
    return (cell.precision if cell.feature == "plain" else "features", cell.world)


def _attempt(world: int, cells: list[Cell], work: Any, *arguments: Any) -> dict[Cell, Any]:
    try:
        found: dict[Cell, Any] = run_ranks(world, work, *arguments, cells, timeout=60 + SECONDS * len(cells))[0]
        return found
    except AssertionError as failure:  # a rank died or hung; that takes no other cell along
        if len(cells) == 1:
            return {cells[0]: str(failure).partition("\n")[0]}
        return {cell: answer for each in cells for cell, answer in _attempt(world, [each], work, *arguments).items()}


def measure(backend: str, cells: list[Cell]) -> dict[Cell, Any]:
    """The engine's curve, a refusal, or what broke."""
    return {cell: _answer(lambda cell=cell: conformance.run_cell(backend, cell)) for cell in cells}


def reference(cells: list[Cell]) -> dict[Cell, Any]:
    """Plain torch."""

    def curve(cell: Cell) -> Any:
        feature = FEATURES[cell.feature]
        model = feature.models[cell.model]
        return feature.reference(model.build(), windows(model, cell), conformance.config("fsdp", cell), cell)

    return {cell: _answer(lambda cell=cell: curve(cell)) for cell in cells}


def _answer(call: Any) -> Any:
    try:
        return call()
    except UnishardError as error:
        return Refusal(f"{type(error).__name__}: {error}")
    except Exception:  # whatever a version raises is its result
        return traceback.format_exc()


def judge(backend: str, cell: Cell, answer: Any, expected: Any) -> dict[str, Any]:
    """What the page needs of a cell: its precision, how far it is from plain torch, and what is wrong."""
    facts: dict[str, Any] = {
        "precision": cell.precision,
        "strategy": cell.strategy,
        "losses": None,
        "norms": None,
        "wrong": "",
    }
    refused = FEATURES[cell.feature].refuses(backend, cell)
    broken = next((each for each in (answer, expected) if isinstance(each, str)), None)
    if broken is not None:
        return facts | {"wrong": _last(broken)}
    if isinstance(answer, Refusal):
        return facts | {"wrong": "" if refused else answer.reason}
    if refused:
        return facts | {"wrong": "was not refused, though this engine does not support it"}
    far, bound = (
        conformance.compare(answer, expected)._asdict(),
        asdict(conformance.tolerance(backend, cell)) | {"lrs": 1e-12},
    )
    wrong = "; ".join(
        f"{name.replace('_', ' ')} {value:.1e}, at most {bound[name]:.0e}"
        for name, value in far.items()
        if not value <= bound[name]
    )
    return facts | {name: float(f"{far[name]:.1e}") for name in ("losses", "norms")} | {"wrong": wrong}


def _last(text: str) -> str:
    """The line of a traceback that says what happened."""
    return next(reversed(list(_lines(text))), "no message")[:300]


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.strip() and not line.startswith((" ", "--", "Traceback")):
            yield line.strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
