"""Several models in one process, and models with data only on rank 0 before they are prepared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

import unishard
from unishard.config import Config
from unishard.testing import oracle
from unishard.testing.cells import Cell, Feature, Recorder
from unishard.testing.models import MODELS, mlp
from unishard.testing.oracle import Curve

_beside: WeakKeyDictionary[unishard.Engine, unishard.Engine] = WeakKeyDictionary()
"""The second engine, which is trained or evaluated beside the measured one."""


def _prepare_inside_init(model: nn.Module, cfg: Config) -> unishard.Engine:
    with unishard.init(cfg):
        built = MODELS["mlp"].build()
    return unishard.prepare(built, cfg)


def _prepare_with_teacher(model: nn.Module, cfg: Config) -> unishard.Engine:
    teacher = unishard.prepare(mlp(seed=11), cfg, train=False)
    engine = unishard.prepare(model, cfg)
    _beside[engine] = teacher
    return engine


def _distilled(student: Any, teacher: Any, batch: dict[str, Any]) -> Tensor:
    out = student(**batch)
    loss: Tensor = out.loss + functional.mse_loss(out.logits.float(), teacher(**batch).logits.float())
    return loss


def _distil(engine: unishard.Engine, data: list[dict[str, Any]], cell: Cell) -> Curve:
    recorder, teacher = Recorder(), _beside.pop(engine)
    with teacher:
        for batch in engine.batches(data):
            loss = _distilled(engine, teacher, batch)
            engine.backward(loss)
            recorder.record(engine.mean(loss), engine.step())
    return recorder.curve()


class _Perturbing(nn.Module):
    """A generator that perturbs a sample to make it hard to classify."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(13, 17), nn.GELU(), nn.Linear(17, 13))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.tanh(self.layers(x))


def _generator() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12)
        return _Perturbing()


def _prepare_with_generator(model: nn.Module, cfg: Config) -> unishard.Engine:
    engine = unishard.prepare(model, cfg)
    _beside[engine] = unishard.prepare(_generator(), cfg)
    return engine


def _play_against(engine: unishard.Engine, data: list[dict[str, Any]], cell: Cell) -> Curve:
    recorder, generator = Recorder(), _beside.pop(engine)
    with generator:
        for batch in engine.batches(data):
            with torch.no_grad():
                made = generator(batch["x"])
            loss = engine(made, batch["labels"]).loss
            engine.backward(loss)
            recorder.record(engine.mean(loss), engine.step())
            with engine.weights.frozen():
                generator.backward(-engine(generator(batch["x"]), batch["labels"]).loss)
            generator.step()
    return recorder.curve()


class _Plain:
    """A plain torch model with the cell's optimizer, schedule, accumulation and clipping."""

    def __init__(self, model: nn.Module, cfg: Config) -> None:
        self.model, self.cfg, self.losses = model, cfg, [0.0]
        self.curve: list[tuple[float, float, float]] = []
        self._parameters = list(model.parameters())
        chosen = cfg.optimizer
        self._optimizer = torch.optim.SGD(
            self._parameters, chosen.lr, momentum=chosen.momentum, weight_decay=chosen.weight_decay
        )
        self._seen = 0

    def learn(self, loss: Tensor) -> None:
        window = self.cfg.training.gradient_accumulation_steps
        for parameter, gradient in zip(
            self._parameters, torch.autograd.grad(loss / window, self._parameters), strict=True
        ):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._seen += 1
        self.losses[-1] += loss.item() / window
        if self._seen % window:
            return
        lr = self.cfg.optimizer.lr * oracle.rate(self.cfg.scheduler, len(self.curve))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        norm = float(nn.utils.clip_grad_norm_(self._parameters, self.cfg.training.gradient_clipping or float("inf")))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.curve.append((self.losses[-1], norm, lr))
        self.losses.append(0.0)


def _turns(data: list[list[dict[str, Any]]], world: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields the concatenated micro-batches of all ranks, one by one."""
    for window in data:
        for start in range(0, len(window), world):
            yield {
                name: torch.cat([batch[name] for batch in window[start : start + world]]).to(device)
                for name in window[0]
            }


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _as_curve(plain: _Plain) -> Curve:
    losses, norms, lrs = zip(*plain.curve, strict=True)
    return Curve(losses, norms, lrs)


def _plain_distil(model: nn.Module, data: list[list[dict[str, Any]]], cfg: Config, cell: Cell) -> Curve:
    student, teacher = _Plain(model, cfg), mlp(seed=11).requires_grad_(False).to(_device(model))
    for batch in _turns(data, cell.world, _device(model)):
        student.learn(_distilled(student.model, teacher, batch))
    return _as_curve(student)


def _plain_play(model: nn.Module, data: list[list[dict[str, Any]]], cfg: Config, cell: Cell) -> Curve:
    discriminator, generator = _Plain(model, cfg), _Plain(_generator().to(_device(model)), cfg)
    for batch in _turns(data, cell.world, _device(model)):
        discriminator.learn(model(generator.model(batch["x"]).detach(), batch["labels"]).loss)
        generator.learn(-model(generator.model(batch["x"]), batch["labels"]).loss)
    return _as_curve(discriminator)


FEATURES = (
    Feature("init_meta", prepare=_prepare_inside_init),
    # Only in fp32: there is no bf16 reference for two models.
    Feature(
        "frozen_teacher", prepare=_prepare_with_teacher, loop=_distil, reference=_plain_distil, precisions=("fp32",)
    ),
    Feature("gan", prepare=_prepare_with_generator, loop=_play_against, reference=_plain_play, precisions=("fp32",)),
)
