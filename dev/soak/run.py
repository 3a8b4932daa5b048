"""Trains for long on both engines and says what grew, and which loss was another one: `make soak`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time

from dev.soak.life import Lived, live
from dev.soak.plan import WORLDS, Life, Segment, draw
from dev.soak.usage import WARM, grown
from unishard.contract.tolerances import TOLERANCES
from unishard.testing import run_ranks
from unishard.testing.cells import BACKENDS

UPDATES, LIVES = 2000, 8
LOSSES = TOLERANCES["fp32"].losses


def problems(said: str, lived: list[Lived]) -> list[str]:
    """What is wrong with a life."""
    wrong = [f"{said}: rank {rank}: {each}" for rank, one in enumerate(lived) for each in grown(one.usages, one.more)]
    left = [name for name in os.listdir("/dev/shm") for one in lived if str(one.process) in name]
    wrong += [f"{said}: {each}" for each in lived[0].differ]
    return wrong + ([f"{said}: left in /dev/shm: {', '.join(left)}"] if left else [])


def deviation(losses: dict[int, float], undisturbed: dict[int, float]) -> tuple[float, int]:
    """The largest relative difference, and its update; infinite where an update is missing or there is one too many."""
    missing = losses.keys() ^ undisturbed.keys()
    if missing:
        return float("inf"), min(missing)
    return max((abs(losses[step] - loss) / abs(loss), step) for step, loss in undisturbed.items())


def soak(backend: str, lives: list[Life]) -> list[str]:
    """What is wrong with a soak of one engine; empty if nothing."""
    wrong: list[str] = []
    losses: dict[int, float] = {}
    repeated = 0
    with tempfile.TemporaryDirectory(prefix="soak-") as root:
        for number, life in enumerate(lives, start=1):
            begin = time.monotonic()
            lived = run_ranks(life.world, live, backend, root, life.segments, timeout=60 + 60 * len(life.segments))
            said = (
                f"{backend}, life {number}: {life.world} ranks, {len(life.segments)} engines, "
                f"{len(lived[0].losses)} updates"
            )
            wrong += problems(said, lived)
            losses |= lived[0].losses
            repeated += lived[0].repeated
            usages = lived[0].usages
            _say(f"{said}, {lived[0].repeated} of them again, in {time.monotonic() - begin:.0f} s")
            _say(f"  from {usages[min(WARM, len(usages)) - 1]}\n  to   {usages[-1]}")
    whole = sum(segment.updates for life in lives for segment in life.segments)
    (undisturbed, *_) = run_ranks(2, live, backend, None, (Segment("full_shard", whole),), timeout=3600)
    apart, step = deviation(losses, undisturbed.losses)
    _say(
        f"{backend}: {whole} losses deviate from those of one run by {apart:.1e} at most (update {step}); {repeated} "
        "were trained again"
    )
    return wrong + (
        [f"{backend}: the loss of update {step} deviates by {apart:.1e}, the bound is {LOSSES:.0e}"]
        if not apart <= LOSSES
        else []
    )


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def main() -> int:
    """Soak both engines and say what was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=UPDATES, help="on each engine")
    parser.add_argument("--lives", type=int, help="one for each number of ranks, or more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="only this one")
    asked = parser.parse_args()
    lives = draw(asked.updates, asked.lives or max(len(WORLDS), asked.updates * LIVES // UPDATES), asked.seed)
    wrong = [each for backend in asked.backend or BACKENDS for each in soak(backend, lives)]
    for each in wrong:
        _say(f"WRONG: {each}")
    _say(f"{len(wrong)} things are wrong" if wrong else "nothing is wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
