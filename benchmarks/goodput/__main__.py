"""Simulates how much of its time a run trains where failures come at random, by the time between two saves.

    python -m benchmarks.goodput --save 30 --resume 60 --start 120          # your own seconds; measures nothing
    python -m benchmarks.goodput --save 30 --blocks 3 --resume 60 --start 120 --mtbf 12 --interval 5 --interval 10
    python -m benchmarks.goodput --write     # 3 minutes
    python -m benchmarks.goodput --kept      # measures nothing

`--blocks` is for saves in the background: what of `--save` stops the updates. A start is the one of `first_step`.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.goodput.page import ASSUMED, INTERVALS, MEASURED, MTBF, figures, tables
from benchmarks.machine import machine
from benchmarks.peers.cell import ENGINES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, words in {
        "save": "a save",
        "blocks": "that a save in the background stops the updates, of those of --save",
        "resume": "reading a checkpoint",
        "start": "from the start of the processes to the first step",
        "notice": "from a failure to the end of the last rank; default: 0",
    }.items():
        parser.add_argument(f"--{name}", type=float, help=f"seconds: {words}")
    parser.add_argument("--mtbf", type=float, action="append", metavar="HOURS", help="default: 7.9 and 1.8")
    parser.add_argument("--interval", type=float, action="append", metavar="MINUTES", help="of updates between saves")
    parser.add_argument("--hidden", type=int, default=1024, help="of the model whose saves are measured")
    parser.add_argument("--layers", type=int, default=21)
    parser.add_argument("--rounds", type=int, default=3)
    MEASURED.run(parser, measure)


def own(given: argparse.Namespace) -> dict[str, float]:
    """The seconds of the command line."""
    found = {name: getattr(given, name) or 0.0 for name in ("notice", "start", "resume", "save")}
    return found if given.blocks is None else found | {"blocks": given.blocks, "complete": given.save}


def measure(given: argparse.Namespace) -> dict[str, Any] | None:
    """Simulate with what both engines measure and with what is assumed, or only with the seconds that are given."""
    if given.save is not None:
        print(tables(figures(own(given), tuple(given.mtbf or MTBF), tuple(given.interval or INTERVALS))))
        return None
    from benchmarks.goodput.measuring import RANKS, numel, times

    results: dict[str, Any] = {"machine": machine(RANKS), "parameters": numel(given.hidden, given.layers), "runs": {}}
    runs = {f"measured, {each}": times(each, given.hidden, given.layers, given.rounds) for each in ENGINES}
    for name, seconds in (runs | {"assumed": ASSUMED}).items():
        results["runs"][name] = {"times": seconds, "figures": figures(seconds)}
        print(name, {key: round(value, 2) for key, value in seconds.items()}, flush=True)
        print(tables(results["runs"][name]["figures"]), flush=True)
    return results


if __name__ == "__main__":
    main()
