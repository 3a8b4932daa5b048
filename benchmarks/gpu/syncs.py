"""Counts how often the host waits for the device in one optimizer step, beside the same engine's loop written by hand.

Counted are torch's own warnings of `torch.cuda.set_sync_debug_mode`, and calls of `synchronize` of which it does not
warn. Waits inside collectives are not, nor those of DeepSpeed in the place of a gather, which it has on one rank only.
The CPU form counts reads of a tensor's value (`aten._local_scalar_dense`), each of which waits on a GPU; it is no
measurement of one.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu import by_hand
from benchmarks.gpu.llamas import SIZES
from benchmarks.gpu.report import Report
from benchmarks.gpu.training import BACKENDS, attempt, full_size
from unishard.testing import run_ranks

BUDGET = 1
"""Synchronizations of an optimizer step beyond those of the loop written by hand: one, to learn whether the gradients
of the step before were finite, which the device has long computed; with SGD, those of this step."""
_STEPS, _WARM_UP = 5, 10
"""Steps that are counted, and those before, in which the guards of the loop look closely."""
_ONE_RANK = "zero/partition_parameters.py"
"""Where DeepSpeed waits for its stream instead of a gather (0.19.8, NoGatherHandle): as often as our units are
gathered."""


def run(report: Report) -> None:
    for backend in BACKENDS:
        for strategy in by_hand.STRATEGIES[backend]:
            name = f"{backend} {strategy}"
            answer = attempt(
                report, name, lambda b=backend, s=strategy: run_ranks(1, count, b, s, report.device, timeout=100)[0]
            )
            if answer is not None:
                judge(report, name, *answer)


def judge(report: Report, name: str, ours: Counter[str], theirs: Counter[str]) -> None:
    own, hand = (sum(places.values()) / _STEPS for places in (ours, theirs))
    where = ", ".join(f"{place} {number / _STEPS:g}" for place, number in ours.most_common(8))
    detail = f"{own:g} a step, by hand {hand:g}" + (f"; {where}" if where else "")
    if report.device == "cpu":
        report.needs_cuda(
            f"{name}: at most {BUDGET} more than by hand",
            f"on the CPU reads of a value: {detail}",
            reads=own,
            by_hand=hand,
        )
    else:
        report.check(
            f"{name}: at most {BUDGET} more than by hand",
            own <= hand + BUDGET,
            detail,
            synchronizations=own,
            by_hand=hand,
        )


def count(backend: str, strategy: str, device: str) -> tuple[Counter[str], Counter[str]]:
    """Places by how often they waited: through unishard, and by hand."""
    size = SIZES["small" if full_size(device) else "tiny"]
    found = []
    for loop in (by_hand.through_unishard, by_hand.LOOPS[backend]):
        step = loop(size, backend, strategy, _WARM_UP + _STEPS + 1)
        for _ in range(_WARM_UP):
            step()
        with watching(device) as places:
            for _ in range(_STEPS):
                step()
        found.append(places)
    return found[0], found[1]


@contextmanager
def watching(device: str) -> Iterator[Counter[str]]:
    """Count what happens inside the block."""
    places: Counter[str] = Counter()
    if device == "cpu":
        with _Reads(places):
            yield places
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught, _explicit(places):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [_short(warning) for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    places.update(place for place in waits if not place.startswith(_ONE_RANK))


def _short(warning: Any) -> str:
    return f"{'/'.join(warning.filename.split('/')[-2:])}:{warning.lineno}"


@contextmanager
def _explicit(places: Counter[str]) -> Iterator[None]:
    """Also count calls that torch does not warn of."""

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            places[name] += 1
            return function(*args, **kwargs)

        return call

    patches = [
        mock.patch.object(owner, "synchronize", counting(name, owner.synchronize))
        for owner, name in (
            (torch.cuda, "torch.cuda.synchronize"),
            (torch.cuda.Event, "Event.synchronize"),
        )
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


class _Reads(TorchDispatchMode):
    """Counts reads of a tensor's value on the CPU."""

    def __init__(self, places: Counter[str]) -> None:
        super().__init__()
        self._places = places

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            self._places["reads"] += 1
        return function(*args, **(kwargs or {}))
