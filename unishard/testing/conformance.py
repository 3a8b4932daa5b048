"""Holds every engine to plain torch.

The author of a third engine runs it by the name of its backend: one test, parametrised with `cells()`, that asserts
`check("my_engine", cell) == []`.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from unishard.config import Config
from unishard.testing import oracle
from unishard.testing.models import MODELS, batch
from unishard.testing.oracle import Curve
from unishard.testing.ranks import run_ranks

__all__ = [
    "GAPS",
    "TOLERANCES",
    "Cell",
    "Deviation",
    "Gap",
    "Tolerance",
    "cells",
    "check",
    "compare",
    "config",
    "expected",
    "measure",
    "run_cell",
    "tolerance",
]

STEPS = 20
_MICRO_BATCH = 2
_STRATEGIES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
_CLIP = 0.5
"""Below the gradient norm of either model in every step, so that clipping always acts."""
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    # AdamW hardly notices a gradient that is too large by a constant; SGD does.
    "mlp": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "llama": {"name": "adamw", "lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of what a user may ask for."""

    model: str
    """A name in `unishard.testing.models.MODELS`."""
    strategy: str
    accumulation: int
    """Micro-batches of each rank in one update."""
    clip: float | None
    precision: str
    """`fp32` or `bf16`."""
    world: int
    """Number of ranks."""

    def __str__(self) -> str:
        clip = "clip" if self.clip else "noclip"
        return f"{self.model}-{self.strategy}-accumulate{self.accumulation}-{clip}-{self.precision}-{self.world}ranks"


def cells() -> list[Cell]:
    """Everything at 2 ranks; at 1 and 4 ranks a subset that has every value of every column with each strategy or with each world."""
    full = [Cell(*values, world=2) for values in product(MODELS, _STRATEGIES, (1, 3), (_CLIP, None), ("fp32", "bf16"))]
    spanning = []
    for world, (index, strategy) in product((1, 4), enumerate(_STRATEGIES)):
        first, second = ("fp32", "bf16") if index % 2 else ("bf16", "fp32")
        spanning += [Cell("mlp", strategy, 3, _CLIP, first, world), Cell("llama", strategy, 1 + index // 2 * 2, None, second, world)]
    return full + spanning


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far an engine may be from the oracle; all but the learning rate are relative."""

    first_losses: float
    """Of the first three losses: before one flipped rounding can have grown."""
    losses: float
    """Of all losses."""
    first_norm: float
    """Of the first gradient norm."""
    norms: float
    """Of all gradient norms."""
    why: str


TOLERANCES = {
    "fp32": Tolerance(1e-6, 1e-6, 1e-5, 1e-5, "only the order of fp32 sums differs"),
    "bf16": Tolerance(
        1e-6,
        5e-3,
        1e-6,
        2e-2,
        "the first updates are the same to fp32 rounding; later a difference of 1e-7 flips one bf16 rounding, and that grows",
    ),
}
"""By compute format."""


class Gap(NamedTuple):
    """Cells in which an engine cannot keep the common tolerance, and what it keeps instead."""

    backend: str
    model: str
    strategy: str
    precision: str
    tolerance: Tolerance
    link: str
    """Where upstream it is known."""


_STAGE_0 = "ZeRO stage 0 in bf16 reduces and accumulates gradients in bf16, and no setting raises that"
_STAGE_0_SOURCE = "https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/fp16/unfused_optimizer.py"

GAPS = (
    Gap("deepspeed", "mlp", "no_shard", "bf16", Tolerance(3e-3, 1e-2, 1e-3, 2e-2, _STAGE_0), _STAGE_0_SOURCE),
    # AdamW divides most of the error away. Wide bounds would hide the update that stage 0 makes when it is built (1.4e-3 here).
    Gap("deepspeed", "llama", "no_shard", "bf16", Tolerance(3e-4, 1e-3, 1e-3, 1e-2, _STAGE_0), _STAGE_0_SOURCE),
)


def tolerance(backend: str, cell: Cell) -> Tolerance:
    """What holds for this engine in this cell."""
    for gap in GAPS:
        if (gap.backend, gap.model, gap.strategy, gap.precision) == (backend, cell.model, cell.strategy, cell.precision):
            return gap.tolerance
    return TOLERANCES[cell.precision]


def config(backend: str, cell: Cell) -> Config:
    """What the cell asks for, as a user would write it."""
    return Config.model_validate(
        {
            "backend": backend,
            "sharding": cell.strategy,
            "precision": cell.precision,
            "training": {
                "micro_batch_size": _MICRO_BATCH,
                "gradient_accumulation_steps": cell.accumulation,
                "gradient_clipping": cell.clip,
            },
            "optimizer": _OPTIMIZERS[cell.model],
            "scheduler": {"name": "cosine", "total_steps": STEPS, "min_lr_ratio": 0.1},
        }
    )


def run_cell(backend: str, cell: Cell) -> Curve:
    """Train the cell through `unishard.prepare`. Collective: call it on `cell.world` ranks."""
    import unishard

    rank = unishard.Topology.from_environment().rank
    losses, norms, lrs = [], [], []
    with unishard.prepare(MODELS[cell.model].build(), config(backend, cell)) as engine:
        window = []
        for micro_batch in engine.batches([batch(cell.model, first, _MICRO_BATCH) for first in _samples(cell, rank)]):
            loss = engine(**micro_batch).loss
            engine.backward(loss)
            window.append(engine.mean(loss))
            step = engine.step()
            if step.updated and step.grad_norm is not None:
                losses.append(math.fsum(window) / len(window))
                norms.append(step.grad_norm)
                lrs.append(step.lr)
                window = []
    return Curve(tuple(losses), tuple(norms), tuple(lrs))


def _samples(cell: Cell, rank: int) -> Iterator[int]:
    """First sample of each micro-batch of a rank: ranks take turns through the global order."""
    for turn in range(STEPS * cell.accumulation):
        yield (turn * cell.world + rank) * _MICRO_BATCH


class Deviation(NamedTuple):
    """Largest relative differences of two curves."""

    first_losses: float
    losses: float
    first_norm: float
    norms: float
    lrs: float


def compare(curve: Curve, reference: Curve) -> Deviation:
    """How far a curve is from the reference; infinite where they have different lengths or a value is not finite."""

    def worst(one: Sequence[float], other: Sequence[float]) -> float:
        if len(one) != len(other):
            return math.inf
        differences = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(one, other, strict=True)]
        return max((d if math.isfinite(d) else math.inf for d in differences), default=math.inf)

    return Deviation(
        worst(curve.losses[:3], reference.losses[:3]),
        worst(curve.losses, reference.losses),
        worst(curve.norms[:1], reference.norms[:1]),
        worst(curve.norms, reference.norms),
        worst(curve.lrs, reference.lrs),
    )


def check(backend: str, cell: Cell) -> list[str]:
    """What an engine does wrong in a cell, a line each; empty when it conforms."""
    deviation, bound = compare(measure(backend, cell), expected(cell)), asdict(tolerance(backend, cell)) | {"lrs": 1e-12}
    return [
        f"{name.replace('_', ' ')} differ from plain torch by {value:.2g} (relative), at most {bound[name]:g} is allowed"
        for name, value in deviation._asdict().items()
        if not value <= bound[name]
    ]


def measure(backend: str, cell: Cell) -> Curve:
    """The engine's curve. Cells that share a world, a model and a precision run in the same processes, once in a session.

    Raises:
        AssertionError: The engine failed in this cell, or its ranks report different curves.
    """
    answers: list[Curve | str] = [answers[cell] for answers in _measure_group(backend, cell.model, cell.precision, cell.world)]
    curves = []
    for rank, answer in enumerate(answers):
        if isinstance(answer, str):
            raise AssertionError(f"{backend}, {cell}: rank {rank} failed:\n{answer}")
        curves.append(answer)
        if repr(answer) != repr(curves[0]):  # NaN is not equal to itself
            raise AssertionError(f"{backend}, {cell}: rank {rank} reports {answer}, rank 0 {curves[0]}")
    return curves[0]


@cache
def _measure_group(backend: str, model: str, precision: str, world: int) -> list[dict[Cell, Any]]:
    group = [cell for cell in cells() if (cell.model, cell.precision, cell.world) == (model, precision, world)]
    return run_ranks(world, _run_group, backend, group, timeout=60.0 + 30.0 * len(group))


def _run_group(backend: str, group: list[Cell]) -> dict[Cell, Any]:
    """Curves by cell, or why there is none: an engine that fails the same way on all ranks leaves the next cells alone."""
    curves: dict[Cell, Any] = {}
    for cell in group:
        try:
            curves[cell] = run_cell(backend, cell)
        except Exception:  # whatever it is, it is this cell's result
            curves[cell] = traceback.format_exc()
    return curves


def expected(cell: Cell) -> Curve:
    """The oracle's curve."""
    return _oracle_group(cell.model, cell.precision, cell.world)[_without_strategy(cell)]


@cache
def _oracle_group(model: str, precision: str, world: int) -> dict[Cell, Curve]:
    group = {_without_strategy(cell) for cell in cells() if (cell.model, cell.precision, cell.world) == (model, precision, world)}
    curves: dict[Cell, Curve] = run_ranks(1, _run_oracle, sorted(group, key=str), timeout=60.0 + 30.0 * len(group))[0]
    return curves


def _without_strategy(cell: Cell) -> Cell:
    return Cell(cell.model, "no_shard", cell.accumulation, cell.clip, cell.precision, cell.world)


def _run_oracle(group: list[Cell]) -> dict[Cell, Curve]:
    return {cell: oracle.train(MODELS[cell.model].build(), list(_windows(cell)), config("fsdp", cell), world=cell.world) for cell in group}


def _windows(cell: Cell) -> Iterator[list[Any]]:
    turns = list(zip(*(_samples(cell, rank) for rank in range(cell.world)), strict=True))
    for start in range(0, len(turns), cell.accumulation):
        yield [batch(cell.model, first, _MICRO_BATCH) for turn in turns[start : start + cell.accumulation] for first in turn]
