"""A training that an engine does as plain torch does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import unishard
from dev.ranks.training import MICRO_BATCHES, curve
from harness.curves import assert_conforms, tolerance
from harness.starting import of_all_ranks
from unishard.config import Config
from unishard.testing import models, oracle
from unishard.testing.cells import MICRO_BATCH
from unishard.testing.conformance import Tolerance
from unishard.testing.oracle import Batch, Curve, Summed


def share_of(number: int, rank: int, world: int = 2) -> Batch:
    """A rank's micro-batch for the MLP."""
    return models.batch("mlp", (number * world + rank) * MICRO_BATCH, MICRO_BATCH)


@dataclass(frozen=True)
class Scenario:
    """A model, its data and its loss; plain torch trains equal ones once in a process."""

    model: Callable[..., nn.Module] = models.mlp
    arguments: tuple[Any, ...] = ()
    """Of the model."""
    data: Callable[[int, int], Batch] = share_of
    """The micro-batch of a number and a rank."""
    loss: Callable[[Any, Batch], Tensor] | None = None
    """Of an engine or a plain model, and a micro-batch. By default the field of what it returns."""
    micro_batches: int = MICRO_BATCHES
    world: int = 2
    around: Callable[[Any], AbstractContextManager[Any]] | None = None
    """A block of an engine with the forward and the backward of a micro-batch."""
    disturb: Callable[[Any, int], None] | None = None
    """Is done to the engine after the backward of each micro-batch, and changes nothing that is compared."""

    def built(self) -> nn.Module:
        """The model, with the same weights at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return self.model(*self.arguments)

    def train(self, engine: Any) -> Curve:
        """By an engine; every rank has the same."""
        done = []
        for number, micro_batch in enumerate(
            engine.batches([self.data(number, engine.rank) for number in range(self.micro_batches)])
        ):
            with self.around(engine) if self.around else nullcontext():
                loss = self.loss(engine, micro_batch) if self.loss else engine(**micro_batch).loss
                engine.backward(loss)
            if self.disturb:
                self.disturb(engine, number)
            done.append((engine.mean(loss), engine.step()))
        found = curve(done)
        assert of_all_ranks(found) == [found] * engine.world_size
        return found

    def plain(self, cfg: Config) -> Curve:
        """By plain torch, from the same config."""
        return _plain(self, cfg.model_dump_json(include={"optimizer", "precision", "scheduler", "training"}))

    def judge(self, cfg: Config, allowed: Tolerance | None = None) -> None:
        """That both are within what the conformance suite allows."""
        with unishard.prepare(self.built(), cfg) as engine:
            found = self.train(engine)
        allowed = allowed or tolerance(cfg.backend, cfg.sharding.strategy, cfg.precision.compute)
        assert_conforms(found, self.plain(cfg), allowed)


@cache
def _plain(scenario: Scenario, said: str) -> Curve:
    cfg = Config.model_validate_json(said)
    every = [scenario.data(number, rank) for number in range(scenario.micro_batches) for rank in range(scenario.world)]
    length = cfg.training.gradient_accumulation_steps * scenario.world
    windows = [every[start : start + length] for start in range(0, len(every), length)]
    summed = Summed(scenario.loss, lambda micro_batch: 1) if scenario.loss else None
    return oracle.train(scenario.built(), windows, cfg, world=scenario.world, summed=summed)
