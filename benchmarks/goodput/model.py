"""A run with failures: simulated, and by a closed formula. Pure; all times in seconds.

A run starts, resumes, and trains. After every `interval` of updates it saves. A save stops the updates for `blocks` and
is complete `lag` later; the next one waits for it. A failure ends the run at any moment, also while it starts. The
updates since the last complete save are lost; the failure is noticed, and the run is started again and resumed.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

STEP = 1.1
"""Ratio of two intervals among which the best is looked for."""


class Costs(NamedTuple):
    """What a run spends beside updates."""

    blocks: float
    """For which a save stops the updates."""
    lag: float
    """From then until the checkpoint is complete; 0 where a save waits for it."""
    restart: float
    """From a failure to the first new update: noticing it, starting, resuming."""


class Shares(NamedTuple):
    """Parts of the time of a run, which are 1 together."""

    useful: float
    """Updates that are not lost: the goodput."""
    saves: float
    """Updates stand still for a save that is complete in time."""
    lost: float
    """Between the last complete save and the failure."""
    restarts: float
    """Between a failure and the first new update."""


def simulate(interval: float, costs: Costs, mtbf: float, *, lives: int, seed: int) -> Shares:
    """Play so many lives of a run, each ended by a failure after a random time (exponential, of the mean `mtbf`)."""
    choice, useful, saves, lost, restarts = random.Random(seed), 0.0, 0.0, 0.0, 0.0
    for _ in range(lives):
        life = choice.expovariate(1 / mtbf)
        trained = max(0.0, life - costs.restart)
        kept, saved_until = _kept(trained, interval, costs)
        useful += kept
        saves += saved_until - kept
        lost += trained - saved_until
        restarts += life - trained
    together = useful + saves + lost + restarts
    return Shares(useful / together, saves / together, lost / together, restarts / together)


def _kept(trained: float, interval: float, costs: Costs) -> tuple[float, float]:
    """Seconds of updates in the last complete checkpoint of a run that fails so long after its first update, and when
    that one was taken.
    """
    kept = taken = 0.0
    now = complete = 0.0
    while True:
        now = max(now + interval, complete) + costs.blocks
        complete = now + costs.lag
        if complete > trained:
            return kept, taken
        kept, taken = kept + interval, now


def best(costs: Costs, mtbf: float, *, lives: int, seed: int) -> tuple[float, Shares]:
    """The interval with the highest simulated goodput of those `STEP` apart around `young_daly`, on equal failures."""
    tried = [young_daly(costs, mtbf) * STEP**power for power in range(-8, 9)]
    found = [(each, simulate(each, costs, mtbf, lives=lives, seed=seed)) for each in tried if each >= costs.lag]
    return max(found, key=lambda each: each[1].useful)


def young_daly(costs: Costs, mtbf: float) -> float:
    """The best interval to first order, `sqrt(2 * blocks * mtbf)`; not shorter than a save takes.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974).
    """
    return max(math.sqrt(2 * costs.blocks * mtbf), costs.lag)


def formula(interval: float, costs: Costs, mtbf: float) -> float:
    """The goodput of infinitely many lives, for intervals of `lag` or more.

    A life keeps `interval` for each save that is complete before it ends, and getting over the restart takes
    `mtbf * (exp(restart / mtbf) - 1)` with the failures in it. Without a lag this is the formula of J. T. Daly,
    "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006).
    """
    saves = math.exp(-costs.lag / mtbf) / math.expm1((interval + costs.blocks) / mtbf)
    return interval * saves / (mtbf * math.exp(costs.restart / mtbf))
