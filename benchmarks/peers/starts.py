"""Time to the first step: fresh ranks for each candidate, several times, in turns.

The clock runs from the first line of a loop to the end of its first optimizer step: process group, model, engine, step.
Imports are not in it: the ranks are forked from a process that has imported torch, transformers, DeepSpeed and most of
unishard. CPU seconds are those of the slower rank and of processes that it runs, such as compilers; they say more than
the clock where ranks outnumber cores.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from benchmarks.peers.cell import Cell
from benchmarks.peers.loops import loop_of
from unishard.testing import run_ranks

_MOST = 9
"""Starts of each candidate."""


class Start(NamedTuple):
    """Seconds until the first step was made."""

    wall: float
    cpu: float


def first_step(candidate: str, cell: Cell) -> Start:
    """Of one rank. Collective."""
    import accelerate  # noqa: F401  # a script's first lines, as the other imports

    wall, cpu = time.perf_counter(), sum(os.times()[:4])
    next(loop_of(candidate, cell))
    return Start(time.perf_counter() - wall, sum(os.times()[:4]) - cpu)


def starts(cell: Cell, candidates: tuple[str, ...], seconds: float, world: int) -> dict[str, list[Start]]:
    """Each candidate's starts, of the slower rank: as many as there is time for, and at least one."""
    found: dict[str, list[Start]] = {name: [] for name in candidates}
    begun = time.monotonic()
    for turn in range(_MOST):
        if turn and (time.monotonic() - begun) * (turn + 1) / turn > seconds:
            break
        for name in candidates[:: -1 if turn % 2 else 1]:
            ranks = run_ranks(world, first_step, name, cell, timeout=300)
            found[name].append(Start(*map(max, zip(*ranks, strict=True))))
    return found
