"""Truncates each file of a checkpoint and flips bits of it, and notes whether that is found: `make integrity`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import product
from typing import NamedTuple

import torch.distributed as dist
import typer

from dev.ranks.interception import flip, truncate
from dev.ranks.judging import problems_of, refused
from dev.ranks.training import ADAMW, config, my_rank, own_share, prepare, train
from unishard.testing import run_ranks
from unishard.testing.cells import BACKENDS

WORLD = 2
HARMS = [(truncate, (share,)) for share in (0.0, 0.3, 0.7, 0.9999)]
HARMS += [(flip, (share, bit)) for share, bit in ((0.0, 0), (0.2, 5), (0.5, 3), (0.8, 7), (1.0, 1))]


class Outcome(NamedTuple):
    """What came of one file that was damaged."""

    file: str
    harm: str
    how: tuple[float, ...]
    """At which part of its length, and which bit."""
    verified: bool
    """Whether `unishard checkpoint verify` names the file, and nothing else."""
    refused: bool
    """Whether `engine.load` names it."""
    seconds: float
    """Until `engine.load` has refused it."""

    @property
    def found(self) -> bool:
        """As it should be."""
        return self.verified and self.refused


def damage_files(root: str, backend: str) -> list[Outcome]:
    """Damage each file in each way, and look; then check that nothing of the engine has changed, and load. Collective."""
    outcomes = []
    with prepare(config(backend, "full_shard", optimizer=ADAMW)) as engine:
        train(engine, own_share(1))
        folder = engine.save(root)
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        before = engine.weights.read("inp.weight")
        for name, (harm, how) in product(names, HARMS):
            whole = (folder / name).read_bytes()
            dist.barrier()
            if my_rank() == 0:
                harm(folder / name, *how)
            dist.barrier()
            problems, begun = problems_of(folder), time.perf_counter()
            told = refused(engine.load, folder)
            seconds = time.perf_counter() - begun
            verified = len(problems) == 1 and f"/{name}: " in problems[0]
            outcomes.append(Outcome(name, harm.__name__, how, verified, f"/{name}: " in told, seconds))
            dist.barrier()
            if my_rank() == 0:
                (folder / name).write_bytes(whole)
        dist.barrier()
        assert engine.weights.read("inp.weight").equal(before)
        assert engine.load(folder, verify="bits").step == 1
        assert problems_of(folder) == []
    return outcomes


def main() -> int:
    """Damage a checkpoint of each engine, and print what was not found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write the figures into docs/integrity.md")
    asked = parser.parse_args()
    found = {}
    for backend in BACKENDS:
        with tempfile.TemporaryDirectory(prefix="damaging-") as root:
            found[backend] = [
                each for rank in run_ranks(WORLD, damage_files, root, backend, timeout=1800) for each in rank
            ]
        missed = [each for each in found[backend] if not each.found]
        typer.echo(f"{backend}: {len(found[backend])} times on a rank, {len(missed)} not found")
        for each in missed:
            typer.echo(f"MISSED: {each}")
    if asked.record:
        from dev.integrity.figures import damaged_files
        from dev.integrity.page import record

        record("files", damaged_files(found))
    return int(any(not each.found for outcomes in found.values() for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
