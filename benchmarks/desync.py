"""What `communication.desync_check` costs a step: the same loop with it and without it, in turns.

    python -m benchmarks.desync                                       # both engines, no_shard and full_shard, 2 ranks
    python -m benchmarks.desync --backend deepspeed --rounds 300

Both loops live in the same processes. Printed is the median of the ratios of neighboring steps, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from itertools import cycle

import torch

import unishard
from benchmarks.ratios import paired, ranged
from benchmarks.timed import timed
from unishard.testing import run_ranks
from unishard.testing.models import llama

BACKENDS, STRATEGIES = ("fsdp", "deepspeed"), ("no_shard", "full_shard")
WARM_UP = 15
"""Steps that are not timed: before each call of the first ten the ranks compare all of them."""


def loop(backend: str, strategy: str, *, checked: bool) -> Callable[[], float]:
    """A step of a tiny model, which returns the gradient norm."""
    cfg = unishard.load(
        {
            "backend": backend,
            "sharding": strategy,
            "training": {"micro_batch_size": 2, "gradient_clipping": 1.0},
            "communication": {"desync_check": checked},
        }
    )
    engine = unishard.prepare(llama(), cfg)
    tokens = torch.randint(0, 97, (8, 2, 16), generator=torch.Generator().manual_seed(engine.rank))

    def steps() -> Iterator[float]:
        for batch in engine.batches({"input_ids": each, "labels": each} for each in cycle(tokens)):
            engine.backward(engine(**batch).loss)
            norm = engine.step().grad_norm
            assert norm is not None
            yield norm

    return steps().__next__


def measure(backend: str, strategy: str, rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds of steps with the check, and without. Collective."""
    loops = [loop(backend, strategy, checked=checked) for checked in (True, False)]
    for _ in range(WARM_UP):
        norms = {step() for step in loops}
        if len(norms) > 1:
            raise RuntimeError(f"the two loops do not train the same: gradient norms {norms}")
    found: tuple[list[float], list[float]] = [], []
    for turn in range(rounds):
        for side in (0, 1) if turn % 2 else (1, 0):
            found[side].append(timed(loops[side]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="default: both")
    parser.add_argument("--strategy", choices=STRATEGIES, action="append", help="default: both")
    parser.add_argument("--rounds", type=int, default=300, help="steps of each loop")
    given = parser.parse_args()
    for backend in given.backend or BACKENDS:
        for strategy in given.strategy or STRATEGIES:
            checked, unchecked = run_ranks(2, measure, backend, strategy, given.rounds, timeout=600)[0]
            print(
                f"{backend} {strategy}: {statistics.median(checked):.2f} ms with the check, "
                f"{statistics.median(unchecked):.2f} ms without; {ranged(paired(checked, unchecked), 3)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
