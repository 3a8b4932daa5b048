"""Tokens per second, MFU and peak memory of a Llama in bf16, through unishard and by hand on the same engine, in turns.

Windows of 20 steps alternate; the device is waited for at the ends of a window only, and what counts is the median of
the ratios of neighboring windows. Where both fit into the card's memory they stay there; otherwise each window has a
process of its own.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any, NamedTuple

import torch

from benchmarks.gpu import by_hand
from benchmarks.gpu.llamas import SIZES, mfu, parameters, peak_of
from benchmarks.gpu.report import Report
from benchmarks.gpu.training import BACKENDS, attempt, full_size
from unishard.testing import run_ranks

SIDES = ("unishard", "by hand")
BOUND = 0.95
"""Minimum speed of unishard relative to the loop by hand."""
_BYTES = 24
"""Maximum bytes per parameter for weights, master weights, gradients and optimizer state, for either engine."""


class Plan(NamedTuple):
    """How it is measured."""

    size: str
    steps: int
    """Of a window."""
    pairs: int
    """Windows of each side."""
    warm_up: int
    together: bool
    """Whether both sides stay in memory."""


class Window(NamedTuple):
    """What one window gave."""

    seconds: float
    """Of a step."""
    peak: float
    """Most bytes of the device that this side held; 0 on the CPU."""
    loss: float
    """Of the first step after the warm-up."""


class Side(NamedTuple):
    """One side's windows, put together."""

    tokens_per_second: float
    mfu: float | None
    peak_gib: float


def plan_of(size: str, device: str, memory: float) -> Plan:
    """On the CPU tiny; on a card of so many bytes both sides together only where they leave half of it to the
    activations.
    """
    if not full_size(device):
        return Plan("tiny", 2, 2 if size == "1b" else 1, 1, size == "1b")
    together = 2 * _BYTES * parameters(SIZES[size])[0] < memory / 2
    return Plan(size, 20, 4, 5, True) if together else Plan(size, 40, 1, 5, False)


def run(report: Report, size: str) -> None:
    cuda = report.device == "cuda"
    memory = torch.cuda.get_device_properties(0).total_memory if cuda else 0.0
    peak = peak_of(torch.cuda.get_device_name(0)) if cuda else None
    plan = plan_of(size, report.device, memory)
    for backend in BACKENDS:
        name = f"{backend} full_shard, {plan.size}"
        answer = attempt(report, name, lambda b=backend: windows_of(b, "full_shard", plan))
        if answer is not None:
            ours, hand = answer
            judge(report, name, plan, ours, hand, peak)


def judge(report: Report, name: str, plan: Plan, ours: list[Window], hand: list[Window], peak: float | None) -> None:
    far = abs(ours[0].loss - hand[0].loss) / abs(hand[0].loss)
    report.check(
        f"{name}: both train the same",
        far <= 5e-3,
        f"losses after the warm-up {far:.1e} apart, at most 5e-03",
        losses=far,
    )
    ratios = [b.seconds / a.seconds for a, b in zip(ours, hand, strict=True)]
    ratio = statistics.median(ratios)
    sides = {who: summary(plan, windows, peak) for who, windows in zip(SIDES, (ours, hand), strict=True)}
    figures: dict[str, Any] = {who: side._asdict() for who, side in sides.items()}
    figures |= {"ratio": ratio, "ratios": ratios, "size": plan.size, "together": plan.together}
    detail = f"{ratio:.3f} (median of {', '.join(f'{each:.3f}' for each in ratios)}); " + "; ".join(
        map(described, sides, sides.values())
    )
    if not full_size(report.device):
        report.needs_cuda(
            f"{name}: tokens/s beside by hand", f"the CPU form runs both loops and measures nothing of worth: {detail}"
        )
    else:
        report.check(f"{name}: at least {BOUND:g} of the tokens/s by hand", ratio >= BOUND, detail, **figures)


def described(who: str, side: Side) -> str:
    used = "MFU unknown for this card" if side.mfu is None else f"{side.mfu:.1%} MFU"
    return f"{who} {side.tokens_per_second:,.0f} tokens/s, {used}, peak {side.peak_gib:.1f} GiB"


def summary(plan: Plan, windows: list[Window], peak: float | None) -> Side:
    """Medians of the speed, the worst of the memory."""
    size = SIZES[plan.size]
    speed = size.batch * size.length / statistics.median(window.seconds for window in windows)
    return Side(speed, None if peak is None else mfu(speed, size, peak), max(window.peak for window in windows) / 2**30)


def windows_of(backend: str, strategy: str, plan: Plan) -> tuple[list[Window], list[Window]]:
    """Windows through unishard, and by hand: in one process, or each in a process of its own, which leaves nothing on
    the device.
    """
    if plan.together:
        ours, hand = run_ranks(1, in_turns, backend, strategy, plan, timeout=270)[0]
        return ours, hand
    found: dict[str, list[Window]] = {who: [] for who in SIDES}
    for pair in range(plan.pairs):
        for who in order(pair):
            found[who].append(run_ranks(1, in_own_process, backend, strategy, plan, who, timeout=120)[0])
    return found["unishard"], found["by hand"]


def order(pair: int) -> tuple[str, ...]:
    """Each side has its turn to be the first."""
    return SIDES[::-1] if pair % 2 else SIDES


def in_turns(backend: str, strategy: str, plan: Plan) -> tuple[list[Window], list[Window]]:
    runs = {who: Loop(who, backend, strategy, plan) for who in SIDES}
    found: dict[str, list[Window]] = {who: [] for who in SIDES}
    for pair in range(plan.pairs):
        for who in order(pair):
            found[who].append(runs[who].window())
    return found["unishard"], found["by hand"]


def in_own_process(backend: str, strategy: str, plan: Plan, who: str) -> Window:
    return Loop(who, backend, strategy, plan).window()


class Loop:
    """One side, built and warmed up."""

    def __init__(self, who: str, backend: str, strategy: str, plan: Plan) -> None:
        loop = by_hand.through_unishard if who == "unishard" else by_hand.LOOPS[backend]
        before = allocated()
        self._steps = plan.steps
        self._step = loop(SIZES[plan.size], backend, strategy, plan.warm_up + plan.pairs * plan.steps + 1)
        for _ in range(plan.warm_up):
            loss = self._step()
        self._loss = float(loss)
        self._own = allocated() - before
        """Bytes that stay on the device between steps."""

    def window(self) -> Window:
        """Time some steps; the device is waited for before the first and after the last."""
        cuda, others = torch.cuda.is_available(), allocated() - self._own
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(self._steps):
            loss = self._step()
        if cuda:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / self._steps
        if not math.isfinite(float(loss)):
            raise RuntimeError(f"the loss is {float(loss)}")
        return Window(seconds, torch.cuda.max_memory_allocated() - others if cuda else 0.0, self._loss)


def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
