"""Counts what a rank holds between updates for each parameter, and writes it beside what `unishard plan` says.

python -m benchmarks.held --write     # 2 minutes
python -m benchmarks.held --kept      # measures nothing
"""

from __future__ import annotations

import argparse
from importlib.metadata import version
from typing import Any

from benchmarks.held.measuring import RANKS, cells, numel, on_a_rank
from benchmarks.held.page import MEASURED, line_of
from unishard.testing import run_ranks

QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    MEASURED.run(parser, measure)


def measure(given: argparse.Namespace) -> dict[str, Any]:
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
