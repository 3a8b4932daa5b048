"""Counts what a rank holds between updates for each parameter, and writes it beside what `unishard plan` says.

python -m benchmarks.held --json benchmarks/held/measured.json --page docs/sharding.md     # 2 minutes
python -m benchmarks.held --from benchmarks/held/measured.json --page docs/sharding.md     # measures nothing
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.held.measuring import RANKS, cells, numel, on_a_rank
from benchmarks.held.page import BEGIN, END, line_of, section
from dev.pages.marked import replace
from unishard.testing import run_ranks

QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--from", dest="source", type=Path, help="results of an earlier run; measures nothing")
    parser.add_argument("--page", type=Path, help="write the table between the marks of this page")
    given = parser.parse_args()
    results = json.loads(given.source.read_text()) if given.source else measure()
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    if given.page:
        replace(given.page, BEGIN, END, section(results))


def measure() -> dict[str, Any]:
    """Train all cells in the same ranks; of each cell, the rank that holds most."""
    chosen, found = tuple(cells()), []
    for cell, *ranks in zip(chosen, *run_ranks(RANKS, on_a_rank, chosen, timeout=1800, env=QUIET), strict=True):
        most = max(ranks, key=lambda rank: rank.held)
        found.append({**cell._asdict(), **most._asdict()})
        print(line_of(found[-1]), flush=True)
    versions = {name: version(name) for name in ("torch", "deepspeed")}
    return {"ranks": RANKS, "parameters": numel(), "versions": versions, "cells": found}


if __name__ == "__main__":
    main()
