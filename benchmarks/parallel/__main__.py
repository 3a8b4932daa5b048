"""Measures layers and experts over two ranks beside plain sharding on both engines, and writes the pages.

    python -m benchmarks.parallel --write     # 3 minutes
    python -m benchmarks.parallel --kept      # measures nothing

All candidates step in turns in the same ranks, on the same samples.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from benchmarks.machine import machine
from benchmarks.parallel.loops import WORLD, llama
from benchmarks.parallel.measuring import in_turns
from benchmarks.parallel.page import MEASURED, line_of, results_of
from unishard.testing import run_ranks

_QUIET = {"KINETO_LOG_LEVEL": "9", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="timed steps of each candidate")
    MEASURED.run(parser, measure)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Step all candidates of both keys."""
    results: dict[str, Any] = {"machine": machine(WORLD)}
    with tempfile.TemporaryDirectory() as folder:
        llama().save_pretrained(folder)
        for key in ("tensor", "expert"):
            sides = run_ranks(WORLD, in_turns, key, given.rounds, folder, timeout=900, env=_QUIET)[0]
            results[key] = [*results_of(sides)]
            for cell in results[key]:
                print(line_of(cell), flush=True)
    return results


if __name__ == "__main__":
    main()
