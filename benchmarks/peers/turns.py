"""Steps of all candidates in turns: in the same ranks, whose steps are so close in time that the machine treats them
alike.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import cycle, permutations
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.overhead import timed
from benchmarks.peers.cell import Cell
from benchmarks.peers.counts import COUNTED, Counts, counted, held
from benchmarks.peers.loops import loop_of
from unishard.testing import run_ranks

WARM_UP = 10
"""Steps that are not timed, after the first one: in that DeepSpeed's stage 3 learns the order of modules, and in the
first ten unishard compares each call of the ranks before its collectives, later in every tenth."""


class Side(NamedTuple):
    """What one candidate did on one rank."""

    seconds: list[float]
    """Of each timed step, of the slower rank."""
    losses: list[float]
    """Of all steps until the last timed one, this rank's."""
    counts: Counts
    held: int
    """Bytes of its tensors between steps."""


class Turns(NamedTuple):
    """How long."""

    seconds: float
    """For everything that the ranks do."""
    least: int
    most: int
    """Rounds; one has a step of each candidate."""


def take_turns(cell: Cell, candidates: tuple[str, ...], plan: Turns) -> dict[str, Side]:
    """Prepare all candidates and step them in turns, in an order that changes with each round. Collective."""
    begun = time.perf_counter()
    loops: dict[str, Iterator[Tensor]] = {name: loop_of(name, cell) for name in candidates}
    losses: dict[str, list[Tensor]] = {name: [] for name in candidates}
    seconds: dict[str, list[float]] = {name: [] for name in candidates}

    def step(name: str) -> float:
        losses[name].append(next(loops[name]))
        return 0.0

    before, holds = held({}), {}
    for name in candidates:
        for _ in range(1 + WARM_UP):
            step(name)
        new = held(before)
        before |= new
        holds[name] = sum(new.values())
    spent = _slowest(time.perf_counter() - begun)  # the same on all ranks, so that they stop together
    orders, last = cycle(permutations(candidates)), 0.0
    for round_ in range(plan.most):
        if round_ >= plan.least and spent + (1 + COUNTED) * last > plan.seconds:
            break
        last = 0.0
        for name in next(orders):
            seconds[name].append(timed(lambda name=name: step(name)) / 1e3)
            last += seconds[name][-1]
        spent += last
    made = {name: [float(loss) for loss in losses[name]] for name in candidates}
    return {
        name: Side(seconds[name], made[name], counted(lambda name=name: step(name), dist.get_world_size()), holds[name])
        for name in candidates
    }


def _slowest(value: float) -> float:
    most = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.item()


# -- Time to the first step: fresh ranks for each candidate, several times, in turns ---------------
# The clock runs from the first line of a loop to the end of its first optimizer step: process group, model, engine,
# step. Imports are not in it: the ranks are forked from a process that has imported torch, transformers, DeepSpeed and
# most of unishard. CPU seconds are those of the slower rank and of processes that it runs, such as compilers; they say
# more than the clock where ranks outnumber cores.

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
