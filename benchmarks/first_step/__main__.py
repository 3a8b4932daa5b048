"""Measures seconds to the first step on both engines beside loops by hand and Accelerate, and writes the page.

    python -m benchmarks.first_step --write     # 6 minutes
    python -m benchmarks.first_step --engine fsdp --ranks 1 --model tiny --seconds 0 --no-compile
    python -m benchmarks.first_step --kept      # measures nothing

Each start is of fresh interpreters. The candidates take turns, and a round that would exceed the time is left out; the
first round is made whatever it takes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.first_step.page import MEASURED, compiled_result, line_of, start_result
from benchmarks.first_step.phases import COMPILED, OWN
from benchmarks.first_step.starting import start
from benchmarks.machine import machine
from benchmarks.peers.cell import ENGINES, SIZES, Cell

RANKS = (1, 2, 4)
STRATEGY, PRECISION = "full_shard", "fp32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", choices=ENGINES, action="append", help="default: both")
    parser.add_argument("--ranks", type=int, action="append", help="default: 1, 2 and 4")
    parser.add_argument("--model", choices=SIZES, default="25m")
    parser.add_argument("--seconds", type=float, default=330.0, help="for everything")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled start out")
    MEASURED.run(parser, measure)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Start everything in turns, and once compiled."""
    begun, about = time.monotonic(), machine(max(given.ranks or RANKS))
    engines = given.engine or ENGINES
    results: dict[str, Any] = {"machine": about, "model": given.model, "starts": [], "compiled": []}
    if not given.no_compile:
        results["compiled"] = [compiled(_cell(engine, given.model), min(given.ranks or RANKS)) for engine in engines]
    cells = list(product(given.ranks or RANKS, engines))
    rounds: dict[tuple[int, str], list[dict[str, Any]]] = {at: [] for at in cells}
    took: dict[tuple[int, str], float] = {}
    for turn in range(100):
        left = [at for at in cells if turn == 0 or time.monotonic() - begun + took[at] < given.seconds]
        for at in left:
            if turn and time.monotonic() - begun + took[at] > given.seconds:
                continue
            since, order = time.monotonic(), list(OWN)[:: -1 if turn % 2 else 1]
            rounds[at].append({name: start(name, _cell(at[1], given.model), at[0]) for name in order})
            took[at] = time.monotonic() - since
            print(f"{at[0]} ranks, {at[1]}: round {turn + 1} took {took[at]:.0f} s", file=sys.stderr, flush=True)
        if not left:
            break
    for (world, engine), made in rounds.items():
        results["starts"] += [start_result(world, engine, name, made) for name in OWN]
    for each in results["starts"]:
        print(line_of(each), flush=True)
    about["minutes"] = round((time.monotonic() - begun) / 60, 1)
    return results


def compiled(cell: Cell, world: int) -> dict[str, Any]:
    """One start without a compiled block, one that compiles it, and one that finds it in torch's cache."""
    with tempfile.TemporaryDirectory(prefix="compiled-") as cache:
        names = ("unishard", COMPILED, COMPILED)
        return compiled_result(world, cell.engine, [start(name, cell, world, Path(cache)) for name in names])


def _cell(engine: str, model: str) -> Cell:
    return Cell(engine, STRATEGY, PRECISION, model)


if __name__ == "__main__":
    main()
