"""Updates of both sides in turns, in the same ranks: timed, compared and counted."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.calls import Calls, recorder
from benchmarks.frameworks.cases import SIDES, Case
from benchmarks.frameworks.loops import training_of
from benchmarks.frameworks.paused import Paused
from benchmarks.peers.turns import WARM_UP, Turns, slowest
from benchmarks.timed import timed
from unishard.failures import collective_check

__all__ = ["Side", "calls_of", "take_turns"]


class Side(NamedTuple):
    """What one side did on one rank."""

    seconds: list[float]
    """Of each timed update, of the slower rank."""
    losses: list[float]
    calls: Calls
    """Python function calls of one update."""


class _Trainings:
    """The trainings of both sides, each with its own state of Accelerate, which is one for a process otherwise."""

    def __init__(self, case: Case, sides: tuple[str, ...]) -> None:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        self._classes = (PartialState, AcceleratorState, GradientState)
        self._states: dict[str, list[dict[str, Any]]] = {side: [{} for _ in self._classes] for side in sides}
        self._trainings = {side: Paused(training_of(side, case)) for side in sides}

    @contextmanager
    def of(self, side: str) -> Iterator[Paused]:
        """One of them, for some updates."""
        for kind, state in zip(self._classes, self._states[side], strict=True):
            kind._shared_state = state
        before = dict(os.environ)
        yield self._trainings[side]
        for name in os.environ.keys() - before.keys():  # by which plugins tell Accelerate that they are there
            del os.environ[name]


def take_turns(case: Case, plan: Turns) -> dict[str, Side]:
    """Prepare both sides and update in turns, each first in every other round. Collective."""
    begun, trainings = time.perf_counter(), _Trainings(case, SIDES)
    losses: dict[str, list[torch.Tensor]] = {side: [] for side in SIDES}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}

    def step(side: str, training: Paused) -> float:
        losses[side].append(training.step())
        return 0.0

    for side in SIDES[::-1]:  # first unishard, which refuses what plugins of DeepSpeed tell transformers
        with trainings.of(side) as training:
            for _ in range(1 + WARM_UP):
                step(side, training)
    spent, last = slowest(time.perf_counter() - begun), 0.0  # the same on all ranks, so that they stop together
    for turn in range(plan.most):
        if turn >= plan.least and spent + last > plan.seconds:
            break
        last = 0.0
        for side in SIDES[:: -1 if turn % 2 else 1]:
            with trainings.of(side) as training:
                seconds[side].append(timed(lambda side=side, training=training: step(side, training)) / 1e3)
            last += seconds[side][-1]
        spent += last
    made = {side: [float(loss) for loss in losses[side]] for side in SIDES}
    return {side: Side(seconds[side], made[side], _counted(trainings, side)) for side in SIDES}


def calls_of(case: Case, side: str) -> Calls:
    """Python function calls of one update of one side. Collective."""
    trainings = _Trainings(case, (side,))
    with trainings.of(side) as training:
        for _ in range(1 + WARM_UP):
            training.step()
    return _counted(trainings, side)


def _counted(trainings: _Trainings, side: str) -> Calls:
    """Of the update with fewer calls: the desync check looks at every tenth one, if updates take no time."""
    samples_all, found = collective_check.samples_all, [Calls(Counter(), Counter()) for _ in range(2)]
    collective_check.samples_all = lambda updates, seconds: samples_all(updates, 0.0)
    try:
        with trainings.of(side) as training:
            training.step()
            for calls in found:
                training.step(recorder(calls))
    finally:
        collective_check.samples_all = samples_all
    dist.barrier()
    return min(found, key=lambda calls: calls.everything)
