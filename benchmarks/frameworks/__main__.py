"""Measures updates of training frameworks on unishard beside the frameworks' own, and writes the page.

python -m benchmarks.frameworks --json measured.json --page docs/performance.md          # 15 minutes
python -m benchmarks.frameworks --framework lightning --engine fsdp --seconds 60
python -m benchmarks.frameworks --from measured.json --page docs/performance.md          # measures nothing

The time is divided among the cells evenly.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.frameworks.cases import CASES, FRAMEWORKS
from benchmarks.frameworks.page import BEGIN, END, line_of, result_of, section, sentence, table
from benchmarks.frameworks.turns import take_turns
from benchmarks.peers.page import machine
from benchmarks.peers.turns import Turns
from dev.pages.marked import replace
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
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--from", dest="source", type=Path, help="results of an earlier run; measures nothing")
    parser.add_argument("--page", type=Path, help="write the table between the marks of this page")
    parser.add_argument("--readme", type=Path, help="write the sentence between the marks of this page")
    given = parser.parse_args()
    results = json.loads(given.source.read_text()) if given.source else measure(given)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    if given.page:
        replace(given.page, BEGIN, END, section(results))
    if given.readme:
        replace(given.readme, BEGIN, END, sentence(results))


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
    print("\n".join(table([])))
    for at, case in enumerate(cases):
        seconds = (given.seconds - (time.monotonic() - begun)) / (len(cases) - at)
        plan = Turns(seconds, LEAST, MOST)
        ranks = run_ranks(given.world, take_turns, case, plan, timeout=600 + 2 * max(0.0, seconds), env=QUIET)
        results["cells"].append(result_of(case, ranks))
        print(line_of(results["cells"][-1]), flush=True)
    return results


if __name__ == "__main__":
    main()
