"""What is compared with plain torch: cells, each a combination of settings, and features, each a way of training.

The plain feature is the loop of the README. Every other one changes the config, the model or the loop, and defines what
plain torch does instead; `unishard.testing.features` lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from torch import nn

import unishard
from unishard.config import Config
from unishard.config.nested import merge
from unishard.contract.tolerances import TOLERANCES, Tolerance
from unishard.testing import oracle
from unishard.testing.known_gaps import KnownGap
from unishard.testing.models import MODELS, TestModel, batch_of
from unishard.testing.oracle import Curve

BACKENDS = ("fsdp", "deepspeed")
"""The engines that come with unishard."""
STEPS = 20
"""Optimizer steps of a cell; schedules are of this length also in a cell that ends earlier."""
MICRO_BATCH = 2
"""Samples of a micro-batch."""
STRATEGIES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
CLIP = 0.5
"""Below the gradient norm of both models in every step, so that clipping always applies."""
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    # AdamW is almost invariant to a gradient that is scaled by a constant; SGD is not.
    "mlp": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "llama": {"name": "adamw", "lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of settings."""

    model: str
    """A name in its feature's `models`."""
    strategy: str
    accumulation: int
    """Micro-batches of each rank in one optimizer step."""
    clip: float | None
    precision: str
    """The value of `precision:`, such as `fp32` or `bf16`."""
    world: int
    """Number of ranks."""
    feature: str = "plain"
    """A name in `unishard.testing.features.FEATURES`."""
    steps: int = STEPS
    """Optimizer steps."""

    def __str__(self) -> str:
        feature = "" if self.feature == "plain" else f"{self.feature}-"
        clip = "clip" if self.clip else "noclip"
        return (
            f"{feature}{self.model}-{self.strategy}-accumulate{self.accumulation}-{clip}-{self.precision}-"
            f"{self.world}ranks"
        )


def config_of(backend: str, cell: Cell, sections: Mapping[str, Any]) -> Config:
    """The config of a cell, as a user would write it.

    Args:
        backend: The backend.
        cell: The settings.
        sections: The feature's sections. An `optimizer` or `scheduler` replaces the plain one, None removes it; other
            sections are merged.
    """
    plain: dict[str, Any] = {
        "backend": backend,
        "sharding": {"strategy": cell.strategy},
        "precision": {"compute": cell.precision},
        "training": {
            "micro_batch_size": MICRO_BATCH,
            "gradient_accumulation_steps": cell.accumulation,
            "gradient_clipping": cell.clip,
        },
        "optimizer": _OPTIMIZERS.get(cell.model, _OPTIMIZERS["mlp"]),
        "scheduler": {"name": "cosine", "total_steps": STEPS, "min_lr_ratio": 0.1},
        # The desync check changes no figure, and takes a quarter of the time of such short runs.
        "communication": {"desync_check": cell.feature == "plain" and cell.clip is None},
    }
    for name in sections.keys() & {"optimizer", "scheduler"}:
        del plain[name]
    return Config.model_validate(
        {name: section for name, section in merge(plain, sections).items() if section is not None}
    )


def _samples(cell: Cell, rank: int) -> Iterator[int]:
    """First sample of each micro-batch of a rank: the global order is assigned to the ranks round-robin."""
    for turn in range(cell.steps * cell.accumulation):
        yield (turn * cell.world + rank) * MICRO_BATCH


def micro_batches(model: TestModel, cell: Cell, rank: int) -> list[dict[str, Any]]:
    """All micro-batches of a rank: `cell.steps` accumulation windows of equal length."""
    return [batch_of(model, first, MICRO_BATCH) for first in _samples(cell, rank)]


def windows(model: TestModel, cell: Cell) -> list[list[dict[str, Any]]]:
    """The micro-batches of all ranks, for each optimizer step: by position in the window, then by rank."""
    turns = list(zip(*(micro_batches(model, cell, rank) for rank in range(cell.world)), strict=True))
    length = cell.accumulation
    return [[one for turn in turns[start : start + length] for one in turn] for start in range(0, len(turns), length)]


class Recorder:
    """Collects the curve of a training loop."""

    def __init__(self) -> None:
        self._window: list[float] = []
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._lrs: list[float] = []

    def record(self, loss: float, step: unishard.Step) -> None:
        """Record a micro-batch.

        Args:
            loss: Mean over ranks.
            step: What `engine.step` returned.
        """
        self._window.append(loss)
        if step.updated and step.grad_norm is not None:
            self._losses.append(math.fsum(self._window) / len(self._window))
            self._norms.append(step.grad_norm)
            self._lrs.append(step.lr)
        if step.updated or step.skipped:
            self._window = []

    def curve(self) -> Curve:
        """The curve of all optimizer steps so far."""
        return Curve(tuple(self._losses), tuple(self._norms), tuple(self._lrs))


def plain_loop(engine: unishard.Engine, data: list[dict[str, Any]], cell: Cell) -> Curve:
    """Train with the README's loop. Collective.

    Args:
        engine: The engine.
        data: This rank's micro-batches.
        cell: The cell that is measured.
    """
    recorder = Recorder()
    for micro_batch in engine.batches(data):
        loss = engine(**micro_batch).loss
        engine.backward(loss)
        recorder.record(engine.mean(loss), engine.step())
    return recorder.curve()


def plain_reference(model: nn.Module, data: list[list[dict[str, Any]]], cfg: Config, cell: Cell) -> Curve:
    """The expected curve of the plain loop.

    Args:
        model: The model, not sharded.
        data: For each optimizer step the micro-batches of all ranks.
        cfg: The cell's config, for any backend.
        cell: The cell that is measured.
    """
    return oracle.train(model, data, cfg, world=cell.world)


def plain_prepare(model: nn.Module, cfg: Config) -> unishard.Engine:
    """Prepare as in the README. Collective."""
    return unishard.prepare(model, cfg)


@dataclass(frozen=True, slots=True)
class Feature:
    """A way of training, and its equivalent in plain torch."""

    name: str
    """Unique name, in snake_case."""
    about: str = ""
    """How it differs from the plain loop, for the page."""
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Config sections, merged over those of the plain cell."""
    models: Mapping[str, TestModel] = field(default_factory=lambda: {"mlp": MODELS["mlp"]})
    strategies: tuple[str, ...] = STRATEGIES
    precisions: tuple[str, ...] = ("fp32", "bf16")
    worlds: tuple[int, ...] = (2,)
    """World sizes at which every combination is measured. If they include 2, there are also a few cells at 1 and 4."""
    only_at_worlds: bool = False
    """Whether there are none of these few, because another feature of the area has them."""
    least_ranks: int = 1
    """The least number of ranks that can train it."""
    accumulation: int = 2
    clip: float | None = CLIP
    steps_in_suite: int = 3
    """Optimizer steps in `conformance.suite`; more where something happens later."""
    prepare: Callable[[nn.Module, Config], unishard.Engine] = plain_prepare
    loop: Callable[[unishard.Engine, list[dict[str, Any]], Cell], Curve] = plain_loop
    reference: Callable[[nn.Module, list[list[dict[str, Any]]], Config, Cell], Curve] = plain_reference
    refused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By backend, the strategies that it must refuse with an error on every rank."""
    gaps: tuple[KnownGap, ...] = ()
    """Where an upstream limitation exceeds the common bounds, in addition to the suite's own `GAPS`."""
    tolerances: Mapping[str, Tolerance] = field(default_factory=lambda: TOLERANCES)
    """By precision, the bounds of cells that are in no gap."""

    def cells(self) -> list[Cell]:
        """Every combination at `worlds`, and at 1 and 4 ranks a few that cover every strategy and every precision."""
        wanted = list(product(self.models, self.strategies, self.precisions, self.worlds))
        if 2 in self.worlds and not self.only_at_worlds:
            model, turns = next(iter(self.models)), enumerate(self.strategies)
            wanted += [
                (model, strategy, self.precisions[turn // 2 % len(self.precisions)], (1, 4)[turn % 2])
                for turn, strategy in turns
            ]
        return [
            Cell(model, strategy, self.accumulation, self.clip, precision, world, self.name)
            for model, strategy, precision, world in dict.fromkeys(wanted)
            if world >= self.least_ranks
        ]

    def refuses(self, backend: str, cell: Cell) -> bool:
        """Whether this backend must refuse the cell."""
        return cell.strategy in self.refused.get(backend, ())
