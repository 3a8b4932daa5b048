"""Measures updates of training frameworks on unishard beside the frameworks' own, and writes the page.

python -m benchmarks.frameworks --write     # 15 minutes
python -m benchmarks.frameworks --framework lightning --engine fsdp --seconds 60
python -m benchmarks.frameworks --kept      # measures nothing

The time is divided among the cells evenly.
"""

from __future__ import annotations

import argparse
import time
from importlib.metadata import version
from typing import Any

from benchmarks.frameworks.cases import CASES, FRAMEWORKS
from benchmarks.frameworks.page import COLUMNS, MEASURED, line_of, result_of
from benchmarks.frameworks.turns import take_turns
from benchmarks.machine import machine
from benchmarks.peers.turns import Turns
from dev.pages.markdown import table
from unishard.testing import run_ranks

LEAST, MOST = 8, 300
"""Rounds of a cell."""
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
"""DDP warns of an argument that the Trainer gives it, and engines call functions by their old names."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, choices in {"framework": FRAMEWORKS, "engine": ("fsdp", "deepspeed")}.items():
        parser.add_argument(f"--{name}", choices=choices, action="append", help="default: all")
    parser.add_argument("--seconds", type=float, default=900.0, help="for everything")
    parser.add_argument("--world", type=int, default=2, help="ranks")
    MEASURED.run(parser, measure)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Run the cells that were asked for, each for its part of the time."""
    begun, about = time.monotonic(), machine(given.world)
    about["versions"] |= {"lightning": version("lightning")}
    cases = [
        case
        for case in CASES
        if case.model in (given.framework or FRAMEWORKS) and case.engine in (given.engine or (case.engine,))
    ]
    results: dict[str, Any] = {"machine": about, "cells": []}
    print(table(COLUMNS))
    for at, case in enumerate(cases):
        seconds = (given.seconds - (time.monotonic() - begun)) / (len(cases) - at)
        plan = Turns(seconds, LEAST, MOST)
        ranks = run_ranks(given.world, take_turns, case, plan, timeout=600 + 2 * max(0.0, seconds), env=QUIET)
        results["cells"].append(result_of(case, ranks))
        print(line_of(results["cells"][-1]), flush=True)
    return results


if __name__ == "__main__":
    main()
