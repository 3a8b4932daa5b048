"""What is held to plain torch: cells, each a combination of what a user may ask for, and features, each a way of training.

The plain feature is the loop of the README. Every other one changes something (the config, the model, the loop) and says in what
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
from unishard.testing import oracle
from unishard.testing.models import MODELS, TestModel, batch_of
from unishard.testing.oracle import Curve
from unishard.testing.tolerances import KnownGap

__all__ = [
    "CLIP",
    "MICRO_BATCH",
    "STEPS",
    "STRATEGIES",
    "Cell",
    "Feature",
    "Recorder",
    "config_of",
    "micro_batches",
    "plain_loop",
    "plain_prepare",
    "plain_reference",
    "windows",
]

STEPS = 20
"""Updates of a cell."""
MICRO_BATCH = 2
"""Samples of a micro-batch."""
STRATEGIES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
CLIP = 0.5
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
    """A name in its feature's `models`."""
    strategy: str
    accumulation: int
    """Micro-batches of each rank in one update."""
    clip: float | None
    precision: str
    """What `precision:` says, such as `fp32` or `bf16`."""
    world: int
    """Number of ranks."""
    feature: str = "plain"
    """A name in `unishard.testing.features.FEATURES`."""

    def __str__(self) -> str:
        feature = "" if self.feature == "plain" else f"{self.feature}-"
        clip = "clip" if self.clip else "noclip"
        return f"{feature}{self.model}-{self.strategy}-accumulate{self.accumulation}-{clip}-{self.precision}-{self.world}ranks"


def config_of(backend: str, cell: Cell, sections: Mapping[str, Any]) -> Config:
    """What a cell asks for, as a user would write it.

    Args:
        backend: The engine.
        cell: What to ask for.
        sections: Of the feature, over the plain cell's. An `optimizer` or `scheduler` replaces the plain one, None leaves it out;
            other sections are merged.
    """
    plain: dict[str, Any] = {
        "backend": backend,
        "sharding": {"strategy": cell.strategy},
        "precision": {"compute": cell.precision},
        "training": {"micro_batch_size": MICRO_BATCH, "gradient_accumulation_steps": cell.accumulation, "gradient_clipping": cell.clip},
        "optimizer": _OPTIMIZERS.get(cell.model, _OPTIMIZERS["mlp"]),
        "scheduler": {"name": "cosine", "total_steps": STEPS, "min_lr_ratio": 0.1},
        # The check for ranks that make other calls changes no figure, and takes a sixth of the time of runs as short as these.
        "communication": {"desync_check": cell.feature == "plain"},
    }
    for name in sections.keys() & {"optimizer", "scheduler"}:
        del plain[name]
    return Config.model_validate({name: section for name, section in merge(plain, sections).items() if section is not None})


def _samples(cell: Cell, rank: int) -> Iterator[int]:
    """First sample of each micro-batch of a rank: ranks take turns through the global order."""
    for turn in range(STEPS * cell.accumulation):
        yield (turn * cell.world + rank) * MICRO_BATCH


def micro_batches(model: TestModel, cell: Cell, rank: int) -> list[dict[str, Any]]:
    """Everything that a rank trains on, micro-batch by micro-batch, `STEPS` accumulation windows of equal length."""
    return [batch_of(model, first, MICRO_BATCH) for first in _samples(cell, rank)]


def windows(model: TestModel, cell: Cell) -> list[list[dict[str, Any]]]:
    """The same for all ranks: for each update the micro-batches, turn by turn, in each turn rank by rank."""
    turns = list(zip(*(micro_batches(model, cell, rank) for rank in range(cell.world)), strict=True))
    length = cell.accumulation
    return [[one for turn in turns[start : start + length] for one in turn] for start in range(0, len(turns), length)]


class Recorder:
    """Collects a curve while a loop trains."""

    def __init__(self) -> None:
        self._window: list[float] = []
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._lrs: list[float] = []

    def record(self, loss: float, step: unishard.Step) -> None:
        """After each micro-batch.

        Args:
            loss: Mean over the ranks.
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
        """Of all updates so far."""
        return Curve(tuple(self._losses), tuple(self._norms), tuple(self._lrs))


def plain_loop(engine: unishard.Engine, data: list[dict[str, Any]], cell: Cell) -> Curve:
    """The README's loop. Collective.

    Args:
        engine: Prepared.
        data: This rank's micro-batches.
        cell: What is measured.
    """
    recorder = Recorder()
    for micro_batch in engine.batches(data):
        loss = engine(**micro_batch).loss
        engine.backward(loss)
        recorder.record(engine.mean(loss), engine.step())
    return recorder.curve()


def plain_reference(model: nn.Module, data: list[list[dict[str, Any]]], cfg: Config, cell: Cell) -> Curve:
    """What the plain loop should give.

    Args:
        model: Whole, not prepared.
        data: For each update the micro-batches of all ranks.
        cfg: Of the cell, on any backend.
        cell: What is measured.
    """
    return oracle.train(model, data, cfg, world=cell.world)


def plain_prepare(model: nn.Module, cfg: Config) -> unishard.Engine:
    """As the README does it. Collective."""
    return unishard.prepare(model, cfg)


@dataclass(frozen=True, slots=True)
class Feature:
    """A way of training, and what plain torch does for it."""

    name: str
    """Words with underscores; unique."""
    about: str = ""
    """What it does that the plain loop does not, for the table."""
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Config over that of the plain cell."""
    models: Mapping[str, TestModel] = field(default_factory=lambda: {"mlp": MODELS["mlp"]})
    strategies: tuple[str, ...] = STRATEGIES
    precisions: tuple[str, ...] = ("fp32", "bf16")
    worlds: tuple[int, ...] = (2,)
    """Numbers of ranks at which every combination is measured. With 2 among them there are a few cells at 1 and at 4 as well."""
    accumulation: int = 2
    clip: float | None = CLIP
    prepare: Callable[[nn.Module, Config], unishard.Engine] = plain_prepare
    loop: Callable[[unishard.Engine, list[dict[str, Any]], Cell], Curve] = plain_loop
    reference: Callable[[nn.Module, list[list[dict[str, Any]]], Config, Cell], Curve] = plain_reference
    refused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By backend the strategies in which it must refuse: an error on every rank is then the right answer, a curve the wrong one."""
    gaps: tuple[KnownGap, ...] = ()
    """Where upstream keeps an engine from the common bounds, beyond the suite's own `GAPS`."""

    def cells(self) -> list[Cell]:
        """Every combination at `worlds`, and at 1 and 4 ranks some that have every strategy and every precision once."""
        wanted = list(product(self.models, self.strategies, self.precisions, self.worlds))
        if 2 in self.worlds:
            model, turns = next(iter(self.models)), enumerate(self.strategies)
            wanted += [(model, strategy, self.precisions[turn // 2 % len(self.precisions)], (1, 4)[turn % 2]) for turn, strategy in turns]
        return [
            Cell(model, strategy, self.accumulation, self.clip, precision, world, self.name)
            for model, strategy, precision, world in dict.fromkeys(wanted)
        ]

    def refuses(self, backend: str, cell: Cell) -> bool:
        """Whether this backend must refuse the cell."""
        return cell.strategy in self.refused.get(backend, ())
