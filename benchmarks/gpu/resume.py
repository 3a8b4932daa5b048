"""Saves on one engine and loads on the other, bit by bit; the losses must match the uninterrupted run."""

from __future__ import annotations

from benchmarks.gpu.report import Report
from benchmarks.gpu.training import full_size
from unishard.contract.tolerances import TOLERANCES
from unishard.testing import resuming
from unishard.testing.cells import BACKENDS
from unishard.testing.resuming import Pair, ResumedRun


def pairs(device: str) -> list[Pair]:
    """Both directions, and each engine into itself, which tells a device that gives other bits each time from a state
    that was lost.

    On the CPU, where the suite resumes every kind of run by every other, both directions.
    """
    found = []
    for precision in ("fp32", "bf16", "fp16") if full_size(device) else ("bf16",):
        full = [ResumedRun(backend, "full_shard", 1, precision) for backend in BACKENDS]
        part = [ResumedRun(backend, "shard_grad_op", 1, precision) for backend in BACKENDS]
        found += [Pair(full[0], full[1]), Pair(full[1], full[0])]
        if full_size(device):
            found += [Pair(part[0], full[1]), Pair(part[1], full[0]), *(Pair(run, run) for run in full)]
    return found


def run(report: Report) -> None:
    for pair, found in resuming.measure(pairs(report.device)).items():
        bound = TOLERANCES[pair.saved.precision]
        close = found.first_losses <= bound.first_losses and found.losses <= bound.losses
        detail = f"losses {found.losses:.1e}, at most {bound.losses:g}" + (", the same bits" if found.same_bits else "")
        report.check(str(pair), close, detail, **found._asdict())
        report.check(f"{pair}: saved again at once, every tensor has the same hash", found.same_state)
