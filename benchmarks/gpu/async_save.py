"""Saves asynchronously while training continues, loads the checkpoint, and compares it with the state at the save."""

from __future__ import annotations

import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

import unishard
from benchmarks.gpu.report import Report
from benchmarks.gpu.training import BACKENDS, attempt, config, full_size, side_by_side, tokens, train, wide_llama
from unishard.contract.tolerances import TOLERANCES
from unishard.testing import run_ranks
from unishard.testing.models import llama

_BEFORE, _AFTER = 3, 6


class Answer(NamedTuple):
    """The result of one engine."""

    returned: float
    """Seconds until `save` returned."""
    complete: float
    """Seconds until the checkpoint was there."""
    steps_meanwhile: int
    """Optimizer steps made before it was."""
    differing: list[str]
    """Parameters that are not, bit by bit, what they were when `save` was called."""
    losses: list[float]
    """After the save."""
    resumed: list[float]
    """The same batches, from the checkpoint."""


def run(report: Report) -> None:
    def compare(backend: str, strategy: str) -> None:
        name = f"{backend} {strategy}"
        work = lambda: run_ranks(1, save_and_load, backend, strategy, report.device, timeout=200)[0]  # noqa: E731
        if (answer := attempt(report, name, work)) is not None:
            judge(report, name, answer)

    side_by_side(
        report.device, [partial(compare, *case) for case in product(BACKENDS, ("full_shard", "shard_grad_op"))]
    )


def judge(report: Report, name: str, answer: Answer) -> None:
    meanwhile = f"save returned after {answer.returned:.2f} s, complete after {answer.complete:.2f} s"
    figures = {"returned": answer.returned, "complete": answer.complete, "steps": answer.steps_meanwhile}
    report.check(
        f"{name}: trains while it is written",
        answer.steps_meanwhile > 0,
        f"{answer.steps_meanwhile} steps; {meanwhile}",
        **figures,
    )
    report.check(f"{name}: holds the moment of the save", not answer.differing, ", ".join(answer.differing[:5]))
    far = max(abs(now - then) / abs(then) for then, now in zip(answer.losses, answer.resumed, strict=True))
    bound = TOLERANCES["bf16"].losses
    report.check(f"{name}: losses resume from it", far <= bound, f"{far:.1e}, at most {bound:g}", losses=far)


def build(backend: str, strategy: str, device: str, seed: int) -> Any:
    # On the GPU large enough that the files take some steps to write.
    model = wide_llama(1024, 8, seed=seed) if full_size(device) else llama(seed)
    return unishard.prepare(model, config(backend, strategy, checkpoint={"async_save": True}))


def save_and_load(backend: str, strategy: str, device: str) -> Answer:
    before, after = tokens(_BEFORE, seed=1), tokens(_AFTER, seed=2)
    with tempfile.TemporaryDirectory(prefix="async-save-") as folder:
        with build(backend, strategy, device, seed=7) as engine:
            train(engine, before)
            there = {name: engine.weights.read(name).cpu() for name in names(engine)}
            start = time.perf_counter()
            checkpoint = Path(engine.save(folder))
            returned = time.perf_counter() - start
            losses, meanwhile = [], 0
            for batch in after:
                losses += train(engine, [batch]).losses
                meanwhile += not checkpoint.exists()
            engine.wait()
            complete = time.perf_counter() - start
        with build(backend, strategy, device, seed=8) as engine:
            engine.load(checkpoint, verify="bits")
            differing = [
                name for name, value in there.items() if not torch.equal(engine.weights.read(name).cpu(), value)
            ]
            resumed = list(train(engine, after).losses)
    return Answer(returned, complete, meanwhile, differing, losses, resumed)


def names(engine: Any) -> list[str]:
    return [name for name, _ in engine.module.named_parameters()]
