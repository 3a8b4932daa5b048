"""Measures unishard beside the same training written by hand and through Accelerate, and writes the page.

    python -m benchmarks.peers --write     # 18 minutes
    python -m benchmarks.peers --model tiny --engine fsdp --seconds 60
    python -m benchmarks.peers --kept      # measures nothing

The time is divided among the cells by the size of the model, the smallest first. A cell is left out, and the page says
so, where less time is left than the last one of its size took.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import product
from typing import Any

from benchmarks.machine import machine
from benchmarks.peers.cell import CANDIDATES, ENGINES, PRECISIONS, SIZES, STRATEGIES, Cell
from benchmarks.peers.page import MEASURED, PICTURE, cell_result, draw, line_of
from benchmarks.peers.turns import Turns, take_turns, theory
from dev.measured import ROOT
from unishard.testing import RankFailure, run_ranks

LEAST, MOST = 3, 300
"""Rounds of a cell."""
QUIET = {"KINETO_LOG_LEVEL": "9", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
"""For the ranks: torch's profiler, which counts the memory, says each of its steps, and DeepSpeed calls functions by
their old names."""
WITHOUT = tuple(name for name in CANDIDATES if name != "Accelerate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, choices in {"engine": ENGINES, "strategy": STRATEGIES, "precision": PRECISIONS, "model": SIZES}.items():
        parser.add_argument(f"--{name}", choices=choices, action="append", help="default: all")
    parser.add_argument(
        "--seconds", type=float, default=1080.0, help="for everything; less than the shortest form takes is exceeded"
    )
    parser.add_argument("--least", type=int, default=LEAST, help="rounds of a cell, whatever the time")
    parser.add_argument("--most", type=int, default=MOST, help="rounds of a cell")
    parser.add_argument("--world", type=int, default=2, help="ranks")
    if MEASURED.run(parser, measure):
        draw(MEASURED.kept(), ROOT / "docs" / PICTURE)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Run the cells that were asked for."""
    for name in ("DS_ACCELERATOR", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_MIXED_PRECISION"):
        os.environ.pop(name, None)
    os.environ |= QUIET
    begun, about = time.monotonic(), machine(given.world)
    models = sorted(given.model or SIZES, key=lambda name: SIZES[name].weight)
    asked = (given.engine or ENGINES, given.strategy or STRATEGIES, given.precision or PRECISIONS)
    cells = [Cell(engine, strategy, precision, model) for model, engine, strategy, precision in product(models, *asked)]
    results: dict[str, Any] = {"machine": about, "cells": [], "notes": []}
    took: dict[str, float] = {}
    for at, cell in enumerate(cells):
        share = cell.size.weight / sum(each.size.weight for each in cells[at:])
        left = given.seconds - (since := time.monotonic()) + begun
        if left < took.get(cell.model, 0.0):
            results["notes"].append(f"{cell} is not measured: the time was over.")
            continue
        results["cells"].append(
            turns_of(cell, Turns(share * left, given.least, given.most), given.world, results["notes"])
        )
        print(line_of(results["cells"][-1]), flush=True)
        took[cell.model] = time.monotonic() - since
    results["machine"]["minutes"] = round((time.monotonic() - begun) / 60, 1)
    return results


def turns_of(cell: Cell, plan: Turns, world: int, notes: list[str]) -> dict[str, Any]:
    """A cell's result; without Accelerate where it does not run."""
    limit = 600 + 2 * max(0.0, plan.seconds)
    try:
        ranks = run_ranks(world, take_turns, cell, CANDIDATES, plan, timeout=limit)
    except RankFailure as failure:
        first = next(iter(failure.errors.values()))
        ranks = run_ranks(world, take_turns, cell, WITHOUT, plan, timeout=limit)
        notes.append(
            f"{cell}: Accelerate is left out, it ends with {first.type}: {first.message.partition(chr(10))[0]}"
        )
    parameters = sum(parameter.numel() for parameter in cell.build().parameters())
    return cell_result(cell, parameters, theory(cell, world), ranks)


if __name__ == "__main__":
    main()
