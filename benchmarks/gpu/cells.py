"""Holds both engines to plain torch on the same device, one rank: strategies, precisions and accumulation."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from itertools import product

import unishard
from benchmarks.gpu.report import Report
from benchmarks.gpu.training import BACKENDS, attempt, full_size, side_by_side
from unishard.testing import conformance, oracle, run_ranks
from unishard.testing.cells import CLIP, STRATEGIES, Cell, windows
from unishard.testing.models import MODELS


def cells(device: str) -> list[Cell]:
    """On the CPU the suite runs them anyway: the MLP with accumulation shows that the piece works."""
    models, accumulations = (list(MODELS), (1, 3)) if full_size(device) else (["mlp"], (3,))
    return [
        Cell(model, *rest, world=1)
        for model, *rest in product(models, STRATEGIES, accumulations, (CLIP,), ("fp32", "bf16", "fp16"))
    ]


def run(report: Report) -> None:
    wanted = cells(report.device)
    references = run_ranks(1, expected, wanted, report.device, timeout=240)[0]

    def compare(backend: str) -> None:
        answers = attempt(report, f"{backend}: ran", lambda: run_ranks(1, measure, backend, wanted, timeout=300)[0])
        judge(report, backend, wanted, answers, references)

    side_by_side(report.device, [partial(compare, backend) for backend in BACKENDS])


def judge(
    report: Report,
    backend: str,
    wanted: list[Cell],
    answers: dict[Cell, oracle.Curve | str] | None,
    references: dict[Cell, oracle.Curve],
) -> None:
    """A check for each cell: within the bounds of the conformance suite."""
    for cell in wanted if answers is not None else []:
        name, answer = f"{backend}: {cell}", answers[cell]
        if isinstance(answer, str):
            report.check(name, False, answer)
            continue
        far = conformance.compare(answer, references[alike(cell)])._asdict()
        bound = asdict(conformance.tolerance(backend, cell)) | {"lrs": 1e-12}
        wrong = [
            f"{what} {value:.2g}, at most {bound[what]:g}" for what, value in far.items() if not value <= bound[what]
        ]
        figures = {what: value for what, value in far.items() if what != "lrs"}
        report.check(
            name, not wrong, "; ".join(wrong) or f"losses {far['losses']:.1e}, norms {far['norms']:.1e}", **figures
        )


def alike(cell: Cell) -> Cell:
    """To plain torch all strategies are one."""
    return replace(cell, strategy=STRATEGIES[0])


def expected(wanted: list[Cell], device: str) -> dict[Cell, oracle.Curve]:
    """Plain torch."""
    curves = {}
    for cell in dict.fromkeys(map(alike, wanted)):
        model = MODELS[cell.model]
        cfg = conformance.config("fsdp", cell)
        curves[cell] = oracle.train(model.build(), windows(model, cell), cfg, world=cell.world, device=device)
    return curves


def measure(backend: str, wanted: list[Cell]) -> dict[Cell, oracle.Curve | str]:
    """Through unishard: a curve, or why there is none."""
    curves: dict[Cell, oracle.Curve | str] = {}
    for cell in wanted:
        try:
            curves[cell] = conformance.run_cell(backend, cell)
        except (unishard.errors.UnishardError, RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
            curves[cell] = f"{type(error).__name__}: {error}"
    return curves
