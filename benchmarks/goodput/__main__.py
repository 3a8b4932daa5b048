"""Simulates how much of its time a run trains where failures come at random, by the time between two saves.

    python -m benchmarks.goodput --save 30 --resume 60 --start 120          # your own seconds; measures nothing
    python -m benchmarks.goodput --save 30 --blocks 3 --resume 60 --start 120 --mtbf 12 --interval 5 --interval 10
    python -m benchmarks.goodput --json measured.json --page docs/goodput.md    # 3 minutes
    python -m benchmarks.goodput --from measured.json --page docs/goodput.md    # measures nothing

`--blocks` is for saves in the background: what of `--save` stops the updates. A start is the one of `first_step`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.goodput.page import ASSUMED, BEGIN, END, INTERVALS, MTBF, figures, section, tables
from benchmarks.peers.cell import ENGINES
from benchmarks.peers.page import machine
from dev.pages.marked import replace


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
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--from", dest="source", type=Path, help="results of an earlier run; measures nothing")
    parser.add_argument("--page", type=Path, help="write the tables between the marks of this page")
    given = parser.parse_args()
    if given.save is not None:
        for line in tables(figures(own(given), tuple(given.mtbf or MTBF), tuple(given.interval or INTERVALS))):
            print(line)
        return
    results = json.loads(given.source.read_text()) if given.source else measure(given)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    if given.page:
        replace(given.page, BEGIN, END, section(results))


def own(given: argparse.Namespace) -> dict[str, float]:
    """The seconds of the command line."""
    found = {name: getattr(given, name) or 0.0 for name in ("notice", "start", "resume", "save")}
    return found if given.blocks is None else found | {"blocks": given.blocks, "complete": given.save}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure both engines, and simulate with that and with what is assumed."""
    from benchmarks.goodput.measuring import RANKS, numel, times

    results: dict[str, Any] = {"machine": machine(RANKS), "parameters": numel(given.hidden, given.layers), "runs": {}}
    runs = {f"measured, {each}": times(each, given.hidden, given.layers, given.rounds) for each in ENGINES}
    for name, seconds in (runs | {"assumed": ASSUMED}).items():
        results["runs"][name] = {"times": seconds, "figures": figures(seconds)}
        print(name, {key: round(value, 2) for key, value in seconds.items()}, flush=True)
        print("\n".join(tables(results["runs"][name]["figures"])), flush=True)
    return results


if __name__ == "__main__":
    main()
