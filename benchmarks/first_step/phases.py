"""A rank that is a script of its own: it imports what its loop needs, makes two steps, and writes what each phase took.

    python -m benchmarks.first_step.phases STARTED FILE CANDIDATE CELL...

The loops are those of `benchmarks/peers/loops.py`, which run all in the first `next`. So the cell that they are given
notes when they build the model and when they ask for data, which they do once engine and optimizer are there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

PHASES = ("import", "build", "shard", "step 1", "step 2")
COMPILED = "unishard, compiled"
"""The candidate with `compile: per_block`."""
OWN = {
    "by hand": {"fsdp": ["torch.distributed.fsdp"], "deepspeed": ["deepspeed"]},
    "Accelerate": {"fsdp": ["accelerate"], "deepspeed": ["accelerate"]},
    "unishard": {"fsdp": ["unishard"], "deepspeed": ["unishard"]},
}
"""What the script of a candidate imports beside torch and its model."""


def phases_of(
    loop_of: Callable[[Any], Iterator[Any]], cell: Any, begun: float, clock: Callable[[], float]
) -> dict[str, float]:
    """Seconds of each phase but the import: of the first two steps of a loop, by its calls of the cell.

    Also `cpu`: those of this process and its children until the first step has ended, imports included.

    Args:
        loop_of: Makes the loop of a cell.
        cell: A `Cell`.
        begun: When the loop began, by the clock.
        clock: Seconds.
    """
    build, data = 0.0, begun

    class Noting(type(cell)):  # type: ignore[misc]  # of a cell's own class, so that all else is as it is there
        def build(self) -> Any:
            nonlocal build
            before = clock()
            model = super().build()
            build += clock() - before
            return model

        def micro_batches(self, rank: int) -> Any:
            nonlocal data
            data = clock()
            return super().micro_batches(rank)

    loop = loop_of(Noting(*cell))
    next(loop)
    first, cpu = clock(), sum(os.times()[:4])
    next(loop)
    phases = {"build": build, "shard": data - begun - build, "step 1": first - data, "step 2": clock() - first}
    return phases | {"cpu": cpu}


def until_the_first(phases: dict[str, float]) -> float:
    """Seconds to the end of the first step."""
    return sum(phases[name] for name in PHASES[:-1])


def main(started: float, file: Path, candidate: str, *cell: str) -> None:
    """Write the seconds of each phase into a file; the import begins when the process was started."""
    engine = cell[0]
    for name in ["torch", *OWN[candidate.partition(",")[0]][engine]]:
        import_module(name)
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: F401  # as a script that builds one

    imported, before = time.time() - started, sum(os.times()[:4])

    # Not counted: what only the benchmark needs. Of unishard these are the tests' tools.
    from benchmarks.peers.cell import Cell
    from benchmarks.peers.loops import loop_of, train

    def loop(cell: Cell) -> Iterator[Any]:
        return train(cell, compile="per_block") if candidate == COMPILED else loop_of(candidate, cell)

    own = sum(os.times()[:4]) - before
    found = phases_of(loop, Cell(*cell), time.perf_counter(), time.perf_counter)
    file.write_text(json.dumps({"import": imported, **found, "cpu": found["cpu"] - own}))


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
