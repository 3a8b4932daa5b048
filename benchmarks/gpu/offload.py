"""Tests pinned offload for races: a short training, repeated with different delays, must give the same bits each time.

Copies between pinned host memory and the device overlap with computation. One that is read too early changes a loss or
a norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product

import torch

import unishard
from benchmarks.gpu.report import Report
from benchmarks.gpu.training import BACKENDS, Curve, attempt, config, full_size, side_by_side, tokens, train, wide_llama
from unishard.contract.tolerances import TOLERANCES
from unishard.testing import run_ranks
from unishard.testing.models import llama

BOTH, OPTIMIZER = {"params": "cpu", "optimizer": "cpu", "pin_memory": True}, {"optimizer": "cpu", "pin_memory": True}
CASES = (
    *product(BACKENDS, ("full_shard",), (BOTH,)),
    *product(BACKENDS, ("shard_grad_op",), (OPTIMIZER,)),
    ("fsdp", "full_shard", OPTIMIZER),  # copies of unishard's own
)
_CONTROLS = 5
"""Repeats without offload, which say whether the device gives the same bits at all."""
_CYCLES = 200_000
"""Clock cycles by which the delay grows with each repeat."""


def run(report: Report) -> None:
    repeats = 50 if full_size(report.device) else 5

    def compare(backend: str, strategy: str, offload: dict[str, object]) -> None:
        places = " and ".join(place for place in offload if place != "pin_memory")
        name = f"{backend} {strategy}, offload {places}"
        work = lambda: run_ranks(1, race, backend, strategy, offload, repeats, report.device, timeout=240)[0]  # noqa: E731
        if (answer := attempt(report, name, work)) is not None:
            judge(report, name, *answer)

    side_by_side(report.device, [partial(compare, *case) for case in CASES])


def judge(report: Report, name: str, offloaded: list[Curve], resident: list[Curve]) -> None:
    distinct, controls = len(set(offloaded)), len(set(resident))
    detail = f"{distinct} different of {len(offloaded)}; without offload {controls} of {len(resident)}"
    finite = all(math.isfinite(value) for curve in offloaded for value in (*curve.losses, *curve.norms))
    report.check(
        f"{name}: the same bits each time", distinct == 1 and finite, detail, distinct=distinct, repeats=len(offloaded)
    )
    far = [abs(a - b) / abs(b) for a, b in zip(offloaded[0].losses, resident[0].losses, strict=True)]
    bound = TOLERANCES["bf16"].losses
    report.check(
        f"{name}: trains as without offload",
        max(far) <= bound,
        f"losses {max(far):.1e}, at most {bound:g}",
        losses=max(far),
    )


def race(
    backend: str, strategy: str, offload: dict[str, object], repeats: int, device: str
) -> tuple[list[Curve], list[Curve]]:
    """Curves with offload, and without."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # would change the timing
    resident = [once(backend, strategy, device, turn, {}) for turn in range(min(repeats, _CONTROLS))]
    return [once(backend, strategy, device, turn, {"offload": offload}) for turn in range(repeats)], resident


def once(backend: str, strategy: str, device: str, turn: int, sections: dict[str, object]) -> Curve:
    cuda = device == "cuda"
    model = wide_llama(512, 4) if full_size(device) else llama()
    cfg = config(backend, strategy, accumulation=2, **sections)
    with unishard.prepare(model, cfg) as engine:
        return train(engine, tokens(8, length=128 if full_size(device) else 16), delay(turn) if cuda else lambda: None)


def delay(turn: int) -> Callable[[], None]:
    """A function that delays the stream, longer in each repeat, so that code that does not wait for it runs too
    early.
    """
    return lambda: torch.cuda._sleep(1 + turn * _CYCLES)
