"""What a background save costs the steps of the process that plans it: rank 0 of many plans and writes the index beside
training.

    python -m benchmarks.beside                  # 1,024 ranks, 32 of the 80 layers of 70 billion parameters
    python -m benchmarks.beside --in-process     # without the child process in which background saves of this size are
    planned

The thread of a background save and the loop share Python's lock; a child process has one of its own. The loop here is a
tiny model in plain torch, whose steps are Python for the most part, as is the host's side of a training on a GPU.
Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch

from benchmarks.scale import local_plans, local_results, parameters
from unishard.checkpoint import writing
from unishard.checkpoint.plan_cache import PlanCache
from unishard.checkpoint.planning import Planning
from unishard.checkpoint.planning_process import PlanningProcess
from unishard.testing.models import llama

SECONDS = 8.0
"""Of steps without a save beside them, before and after those with one."""


def steps() -> Callable[[], float]:
    """A loop's step: makes one, and says what it took in ms."""
    model, number = llama().train(), count()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> float:
        begun = time.perf_counter()
        ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(next(number)))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return 1e3 * (time.perf_counter() - begun)

    return step


def save(world: int, names: list[str], planning: Planning | PlanningProcess) -> Callable[[], None]:
    """What rank 0 does in a save beside writing its tensors, with the answers of the other ranks made in advance."""
    planner, plans = local_plans(world, names, cache := PlanCache())
    cache.planning = made = Planning()
    planner.create_global_plan([pickle.loads(plan) for plan in plans])
    results = local_results(world, names, made)
    cache.planning = planning

    def plan_and_write() -> None:
        with tempfile.TemporaryDirectory() as folder:
            final, metadata = planner.create_global_plan([pickle.loads(plan) for plan in plans])
            for plan in final:
                pickle.dumps(plan)
            writer = writing._Writer(Path(folder), {}, lambda written: None, planner)
            writer.finish(metadata, [pickle.loads(result) for result in results])

    return plan_and_write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--world", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--in-process", action="store_true", help="plan in the process that trains")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in parameters() if not name.startswith("layers.") or int(name.split(".")[1]) < given.layers]
    planning = Planning() if given.in_process else PlanningProcess()
    act = save(given.world, names, planning)
    step = steps()
    before = _for_seconds(step)
    thread = threading.Thread(target=act)
    begun = time.perf_counter()
    thread.start()
    beside = []
    while thread.is_alive():
        beside.append(step())
    took = time.perf_counter() - begun
    if isinstance(planning, PlanningProcess):
        planning.close()
    alone = before + _for_seconds(step)
    print(
        f"a step alone: {statistics.median(alone):.2f} ms, 99 % of them within {_most(alone):.2f} ms ({len(alone)} "
        "steps)"
    )
    print(
        f"beside the save, for {took:.1f} s: {statistics.median(beside):.2f} ms, 99 % within {_most(beside):.2f} ms, "
        f"the longest {max(beside):.0f} ms ({len(beside)} steps)"
    )
    print(f"the save costs {took - len(beside) * statistics.mean(alone) / 1e3:.2f} s of steps")


def _for_seconds(step: Callable[[], float]) -> list[float]:
    begun, found = time.perf_counter(), []
    while time.perf_counter() - begun < SECONDS:
        found.append(step())
    return found


def _most(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


if __name__ == "__main__":
    main()
