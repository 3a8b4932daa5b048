"""Layers, experts and sequences over ranks against plain torch, a card each. The CPU form has two ranks, and a cell of
each feature.
"""

from __future__ import annotations

import torch

from benchmarks.gpu.report import Report
from benchmarks.gpu.training import BACKENDS, attempt, full_size
from unishard.testing import conformance
from unishard.testing.cells import Cell
from unishard.testing.features import FEATURES

_FEATURES = ("tensor", "tensor_recomputed", "experts", "ulysses", "allgather")


def wanted_cells(device: str, cards: int) -> tuple[Cell, ...]:
    """Those for which there are cards."""
    cells = [[cell for cell in FEATURES[name].cells() if 1 < cell.world <= cards] for name in _FEATURES]
    return tuple(cell for each in cells for cell in (each if full_size(device) else each[-1:]))


def run(report: Report) -> None:
    cards = torch.cuda.device_count() if report.device == "cuda" else 2
    cells = wanted_cells(report.device, cards)
    if not cells:
        report.unsupported("ranks with a card each", f"needs two cards, and there is {cards}")
        return
    for backend in BACKENDS:
        for cell in cells:
            problems = attempt(report, f"{backend} {cell}", lambda: conformance.check(backend, cell, cells))  # noqa: B023
            if problems is not None:
                report.check(f"{backend} {cell}", not problems, "; ".join(problems))
