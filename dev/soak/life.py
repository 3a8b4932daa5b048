"""One life of a soak: engines that resume, train, evaluate, save and go back, in the same processes."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch

import unishard
from dev.soak.plan import Segment, config
from dev.soak.usage import WARM, Usage, types_of_objects, usage
from unishard.testing.models import MODELS, batch

__all__ = ["Lived", "live"]

SAMPLES = 48


class Lived(NamedTuple):
    """What a life gave on one rank."""

    process: int
    losses: dict[int, float]
    """Of each update that the next engine goes on from."""
    usages: list[Usage]
    """After each engine."""
    more: Counter[str]
    """Objects that were added since the life was warm, by type."""
    repeated: int
    """Updates that were trained again with the same strategy."""
    differ: list[str]
    """Those of them whose loss was another one."""


class _Beyond:
    """Updates that will be trained again: their losses have to be the same to the last bit."""

    def __init__(self) -> None:
        self._losses: dict[tuple[str, int], float] = {}
        self.repeated = 0
        self.differ: list[str] = []

    def keep(self, strategy: str, losses: dict[int, float]) -> None:
        """Remember what will be trained again."""
        self._losses = {(strategy, step): loss for step, loss in losses.items()}

    def check(self, strategy: str, losses: dict[int, float]) -> None:
        """Compare what was trained again."""
        for step, loss in losses.items():
            first = self._losses.get((strategy, step))
            self.repeated += first is not None
            if first is not None and first != loss:
                self.differ.append(
                    f"update {step} of {strategy} had the loss {first!r}, and {loss!r} when trained again"
                )


def live(backend: str, root: str | None, segments: tuple[Segment, ...]) -> Lived:
    """Play segments one after the other. Collective."""
    everything = batch("mlp", 0, SAMPLES)
    data = [{name: value[at] for name, value in everything.items()} for at in range(SAMPLES)]
    losses: dict[int, float] = {}
    usages: list[Usage] = []
    closed: list[weakref.ref[Any]] = []
    warm: Counter[str] = Counter()
    beyond = _Beyond()
    for segment in segments:
        closed += _play(config(backend, segment, root), segment, data, losses, beyond)
        usages.append(usage(closed))
        warm = types_of_objects() if len(usages) == WARM else warm
    return Lived(os.getpid(), losses, usages, types_of_objects() - warm, beyond.repeated, beyond.differ)


def _play(
    cfg: unishard.Config, segment: Segment, data: list[Any], losses: dict[int, float], beyond: _Beyond
) -> list[weakref.ref[Any]]:
    model = MODELS["mlp"].build()
    with unishard.prepare(model, cfg) as engine:
        loader = unishard.dataloader(data, cfg)
        begin = engine.resumed.step if engine.resumed else 0
        training = _train(engine, loader, begin)
        done = dict(islice(training, segment.updates))
        beyond.check(segment.strategy, done)
        losses |= done
        if segment.evaluates:
            engine.eval()
            for micro_batch in engine.batches(unishard.dataloader(data, cfg, shuffle=False)):
                engine.mean(engine(**micro_batch).loss)
            engine.train()
        if cfg.checkpoint.dir is not None:
            engine.save()
            step = begin + len(done)
            beyond.keep(segment.strategy, dict(islice(training, segment.beyond)))
            if segment.goes_back:
                engine.wait()
                if engine.load().step != step:
                    raise AssertionError(f"went back to another step than {step}")
                beyond.check(segment.strategy, dict(islice(_train(engine, loader, step), segment.beyond)))
        return [weakref.ref(engine), weakref.ref(model)]


def _train(engine: Any, loader: Any, step: int) -> Iterator[tuple[int, float]]:
    """Number and loss of each update, epoch after epoch."""
    window = []
    while True:
        for micro_batch in engine.batches(loader):
            loss = engine(**micro_batch).loss
            engine.backward(loss)
            window.append(loss.detach())
            if engine.step().updated:
                step += 1
                yield step, engine.mean(torch.stack(window).mean())
                window = []
