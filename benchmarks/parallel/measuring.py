"""Steps of all candidates in turns, in the same ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count

from torch import Tensor

from benchmarks.parallel.loops import (
    WORLD,
    Loop,
    llama,
    mean,
    mixtral,
    through_autotp,
    through_transformers,
    through_unishard,
)
from benchmarks.peers.turns import Side, counted, held
from benchmarks.timed import timed

WARM_UP = 11
"""Steps before those that are timed: in the first ten unishard compares each call of the ranks before its
collectives."""
ENGINES = ("fsdp", "deepspeed")


def candidates(key: str, folder: str) -> Mapping[str, Callable[[], Loop]]:
    """What steps in turns for a key of `parallel`, plain sharding first; a folder has the Llama."""
    build = llama if key == "tensor" else mixtral
    ways = {f"full_shard on {engine}": partial(through_unishard, build, engine, {}) for engine in ENGINES}
    ways |= {f"{key}: 2 on {engine}": partial(through_unishard, build, engine, {key: 2}) for engine in ENGINES}
    others = {"transformers": partial(through_transformers, folder), "AutoTP": through_autotp}
    return ways | (others if key == "tensor" else {})


def in_turns(key: str, rounds: int, folder: str) -> dict[str, Side]:
    """Step the candidates of a key, in an order that changes with each round. Collective."""
    loops = {name: start() for name, start in candidates(key, folder).items()}
    losses: dict[str, list[Tensor]] = {name: [] for name in loops}
    seconds: dict[str, list[float]] = {name: [] for name in loops}

    def step(name: str) -> float:
        losses[name].append(next(loops[name]))
        return 0.0

    before, holds = held({}), {}
    for name in loops:
        for _ in range(WARM_UP):
            step(name)
        new = held(before)
        before |= new
        holds[name] = sum(new.values())
    for _, names in zip(range(rounds), _orders([*loops]), strict=False):
        for name in names:
            seconds[name].append(timed(partial(step, name)) / 1e3)
    made = {name: [mean(loss) for loss in own] for name, own in losses.items()}
    return {name: Side(seconds[name], made[name], counted(partial(step, name), WORLD), holds[name]) for name in loops}


def _orders(names: list[str]) -> Iterator[list[str]]:
    for first in count():
        at = first % len(names)
        yield names[at:] + names[:at]
