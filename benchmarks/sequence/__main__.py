"""Measures long sequences on both engines beside Accelerate's own and beside half the length, and writes the page.

    python -m benchmarks.sequence --write     # 40 minutes
    python -m benchmarks.sequence --hybrid --write     # the hybrid model only: 3 minutes
    python -m benchmarks.sequence --engine fsdp --rounds 1 --budget 0
    python -m benchmarks.sequence --kept      # measures nothing

Every candidate starts anew in each round, in turns, for Accelerate's attention replaces that of all models of its
process.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.machine import machine
from benchmarks.sequence.measuring import longest, updates
from benchmarks.sequence.page import MEASURED, OF_HYBRIDS, REFERENCE, Comparison, line_of, result_of
from benchmarks.sequence.training import ENGINES, GROUP, SIZE, Candidate

SPLIT = {method: {"parallel": {"sequence": {"size": GROUP, "method": method}}} for method in ("ulysses", "allgather")}
HALF = Candidate("half the length", SIZE.length // 2, {})
CANDIDATES = (*(Candidate(method, sections=sections) for method, sections in SPLIT.items()), HALF)
ACCELERATE = {"deepspeed": (Candidate("Accelerate"),)}
"""Its `cp_size` on FSDP2 does not run on CPU: torch 2.13 has no sharding strategy for
`aten._scaled_dot_product_flash_attention_for_cpu`."""
OF_HYBRID = SIZE.length // 2
"""Positions of a sequence of the hybrid model: torch's recurrences take their time."""
HYBRID = (
    *(
        Candidate(way, OF_HYBRID, sections={"parallel": {"sequence": {"size": GROUP, "recurrences": way}}}, hybrid=True)
        for way in ("heads", "states")
    ),
    HALF._replace(length=OF_HYBRID // 2, hybrid=True),
)
CHUNKED = {"training": {"loss_chunk_tokens": 256}}
WITHIN = (
    Candidate("one rank a sequence", sections={}),
    Candidate("a group of 2", sections=SPLIT["ulysses"]),
    Candidate("a group of 2, the loss in chunks", sections=SPLIT["ulysses"] | CHUNKED),
    Candidate("and recomputation", sections=SPLIT["ulysses"] | CHUNKED | {"activation_checkpointing": "full"}),
)
"""Whose longest sequence is looked for."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", choices=ENGINES, action="append", help="default: both")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each candidate")
    parser.add_argument("--budget", type=int, default=256, help="MiB of an update, for the longest sequence; 0: none")
    parser.add_argument("--seconds", type=float, default=160.0, help="for the hybrid model, of at least one round")
    parser.add_argument("--hybrid", action="store_true", help="measure only the hybrid model, and keep the rest")
    MEASURED.run(parser, measure)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Time all candidates, and look for the longest sequences."""
    results = MEASURED.kept() if given.hybrid else _of_attention(given)
    results["hybrid"] = {"machine": machine(GROUP), "cells": []}
    for engine in given.engine or ENGINES:
        share = given.seconds / len(given.engine or ENGINES)
        results["hybrid"]["cells"] += _timed(engine, HYBRID, given.rounds, OF_HYBRIDS, seconds=share)
    return results


def _of_attention(given: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {"machine": machine(GROUP), "cells": [], "longest": [], "budget": given.budget}
    for engine in given.engine or ENGINES:
        results["cells"] += _timed(engine, (*CANDIDATES, *ACCELERATE.get(engine, ())), given.rounds, REFERENCE)
        for each in WITHIN if given.budget else ():
            length = longest(engine, each, given.budget << 20)
            results["longest"].append({"engine": engine, "name": each.name, "length": length})
            print(f"{engine}: {each.name}: {length:,} positions", flush=True)
    return results


def _timed(
    engine: str, candidates: Sequence[Candidate], count: int, reference: Comparison, *, seconds: float = math.inf
) -> Iterator[dict[str, Any]]:
    """The results of a number of rounds, of which none but the first begins when the time is over."""
    rounds, end = [], time.monotonic() + seconds
    while not rounds or (len(rounds) < count and time.monotonic() < end):
        rounds.append({each.name: updates(engine, each) for each in candidates})
    for each in candidates:
        result = result_of(engine, each.name, rounds, reference)
        print(line_of(result, reference), flush=True)
        yield result


if __name__ == "__main__":
    main()
