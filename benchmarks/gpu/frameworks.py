"""Holds loops of Accelerate, transformers' Trainer and Lightning on both engines to their own, on one rank."""

from __future__ import annotations

import os
import traceback
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import NamedTuple

import torch

from benchmarks.gpu.framework_loops import ACCUMULATION, LOOPS, UPDATES, Cell, Seen
from benchmarks.gpu.report import Report
from benchmarks.gpu.training import BACKENDS, attempt, full_size, side_by_side
from unishard.testing import run_ranks

# In bf16 the frameworks run autocast, which keeps softmax, norms and the residual stream in other dtypes than an engine
# that casts parameters and inputs. Roundings differ from the first loss on, so this is wider than `TOLERANCES`.
BOUNDS = {"fp32": 2e-5, "bf16": 2e-2}
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that the frameworks do not see on their own: with them they would start a process group."""


class Trained(NamedTuple):
    """The end of a training."""

    losses: list[float]
    """Of each update."""
    places: list[str]
    """Devices, and `sharded` if its parameters were."""


Answers = dict[Cell, Trained | str]
"""How each training ended, or its error."""


def run(report: Report) -> None:
    precisions = ("fp32", "bf16") if full_size(report.device) else ("fp32",)
    there = []
    for name, (package, _) in LOOPS.items():
        if find_spec(package) is None:
            report.unsupported(name, f"{package} is not installed")
        else:
            there.append(name)
    own = answers(report, "own", [Cell(name, "own", precision) for name, precision in product(there, precisions)])

    def compare(name: str) -> None:
        judge(report, answers(report, name, [Cell(name, *rest) for rest in product(BACKENDS, precisions)]), own)

    side_by_side(report.device, [partial(compare, name) for name in there])


def answers(report: Report, name: str, wanted: list[Cell]) -> Answers:
    """Trainings in a process of their own; none if it dies, which is recorded."""
    work = lambda: run_ranks(1, measure, wanted, report.device, timeout=150)[0]  # noqa: E731
    return (attempt(report, f"{name}: ran", work) if wanted else None) or {}


def judge(report: Report, found: Answers, own: Answers) -> None:
    """Checks for each training on an engine: how far its losses are from the framework's own, and where it ran."""
    for cell, answer in found.items():
        plain, bound = own.get(cell._replace(side="own"), "the framework's own run is missing"), BOUNDS[cell.precision]
        if isinstance(answer, str) or isinstance(plain, str):
            report.check(str(cell), False, "\n".join(each for each in (answer, plain) if isinstance(each, str)))
            continue
        far = max(abs(one - other) / abs(other) for one, other in zip(answer.losses, plain.losses, strict=True))
        falls = len(plain.losses) == UPDATES and plain.losses[-1] < 0.97 * plain.losses[0]
        detail = f"losses {plain.losses[0]:.2f} to {plain.losses[-1]:.2f}, apart {far:.1e}, at most {bound:g}"
        report.check(str(cell), far <= bound and falls, detail, losses=far)
        places, there = (answer.places, plain.places), ([report.device, "sharded"], [report.device])
        report.check(f"{cell}: all tensors on {report.device}, and sharded by the engine", places == there, str(places))
        exact = cell._replace(precision="fp32")
        if exact != cell:
            pairs = ((answer, found.get(exact)), (plain, own.get(exact._replace(side="own"))))
            rounded = all(not isinstance(other, Trained) or one.losses != other.losses for one, other in pairs)
            report.check(f"{cell}: rounds otherwise than fp32", rounded)


def measure(wanted: list[Cell], device: str) -> Answers:
    """Train each, whatever the others raise."""
    started, found = dict(os.environ), Answers()
    for cell in wanted:
        os.environ.clear()
        hidden = _LAUNCHER if cell.side == "own" else ()
        os.environ.update({name: value for name, value in started.items() if name not in hidden})
        seen = Seen()
        try:
            LOOPS[cell.framework][1](cell, device, seen)
            losses = torch.stack(seen.losses).view(-1, ACCUMULATION).mean(1)
            found[cell] = Trained(losses.tolist(), sorted(seen.places))
        except Exception:
            found[cell] = traceback.format_exc()
    return found
