"""Times and memory of a candidate's updates, in fresh ranks: Accelerate's own attention stays in a process for good."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.sequence.training import GROUP, Candidate, accelerate_on_deepspeed, through_unishard
from benchmarks.timed import timed
from dev.ranks.counting import peak_of
from unishard.testing import run_ranks

WARM_UP = 3
"""Updates before those that are timed."""
TIMED = 5
QUIET = {"KINETO_LOG_LEVEL": "9", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}


class Updates(NamedTuple):
    """Of one start of a candidate."""

    seconds: list[float]
    """Of each timed update, of the slowest rank."""
    losses: list[float]
    """Of all updates, of the micro-batch of a group."""
    peak: int
    """Most bytes that torch's allocator hands out in an update beyond those held between updates, of rank 0."""


def updates(engine: str, candidate: Candidate, count: int = TIMED) -> Updates:
    """Start the ranks, and make the updates."""
    return run_ranks(GROUP, _in_rank, engine, candidate, count, timeout=900, env=QUIET)[0]


def peak(engine: str, candidate: Candidate) -> int:
    """Only the peak."""
    return updates(engine, candidate, count=0).peak


def longest(engine: str, candidate: Candidate, budget: int, step: int = 256) -> int:
    """The longest sequence of a multiple of `step` whose update stays within a budget, in bytes; 0 if none does."""

    def fits(length: int) -> bool:
        return peak(engine, candidate._replace(length=length)) <= budget

    if not fits(step):
        return 0
    least = step
    while fits(2 * least):
        least *= 2
    most = 2 * least
    while most - least > max(step, least // 16):
        middle = (least + most) // 2 // step * step
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def _in_rank(engine: str, candidate: Candidate, count: int) -> Updates:
    loop = _loop(engine, candidate)
    losses, seconds = [next(loop) for _ in range(WARM_UP)], []
    for _ in range(count):
        seconds.append(timed(lambda: losses.append(next(loop)) or 0.0) / 1e3)
    most = peak_of(lambda: losses.append(next(loop)))
    return Updates(seconds, losses, most)


def _loop(engine: str, candidate: Candidate) -> Iterator[float]:
    return through_unishard(engine, candidate) if candidate.sections is not None else accelerate_on_deepspeed(candidate)
