"""All optimizers, parameter groups, and optimizers and schedulers that the caller passes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import unishard
from unishard.config import Config, Scheduler
from unishard.testing import oracle
from unishard.testing.cells import STEPS, Cell, Feature
from unishard.testing.models import MODELS
from unishard.testing.oracle import Curve

_WARMUP = 4


def _own(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups in another order than the model's: no weight decay for vectors, a lower learning rate for matrices."""
    every = list(parameters)
    groups = [
        {"params": [parameter for parameter in every if parameter.dim() < 2], "weight_decay": 0.0},
        {"params": [parameter for parameter in reversed(every) if parameter.dim() >= 2], "lr": 1e-3},
    ]
    return torch.optim.AdamW(groups, lr=4e-3, betas=(0.8, 0.95), weight_decay=0.1, amsgrad=True)


def _own_adagrad(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that has state before its first step."""
    every = list(parameters)
    groups: list[dict[str, Any]] = [{"params": every[:2], "lr": 3e-3}, {"params": every[2:], "weight_decay": 0.1}]
    return torch.optim.Adagrad(groups, lr=1e-2, lr_decay=0.01, initial_accumulator_value=0.1)


def _linear(update: int) -> float:
    return update / _WARMUP if update < _WARMUP else (STEPS - update) / (STEPS - _WARMUP)


def _with_object(model: nn.Module, cfg: Config) -> unishard.Engine:
    return unishard.prepare(model, cfg, _own(model.parameters()))


def _with_adagrad(model: nn.Module, cfg: Config) -> unishard.Engine:
    return unishard.prepare(model, cfg, _own_adagrad(model.parameters()))


def _with_scheduler(model: nn.Module, cfg: Config) -> unishard.Engine:
    optimizer = _own(model.parameters())
    return unishard.prepare(model, cfg, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, _linear))


def _with_scheduler_function(model: nn.Module, cfg: Config) -> unishard.Engine:
    return unishard.prepare(
        model, cfg, scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, _linear)
    )


def _object(model: nn.Module, data: list[list[dict[str, Any]]], cfg: Config, cell: Cell) -> Curve:
    return oracle.train(model, data, cfg, world=cell.world, optimizer=_own)


def _adagrad(model: nn.Module, data: list[list[dict[str, Any]]], cfg: Config, cell: Cell) -> Curve:
    return oracle.train(model, data, cfg, world=cell.world, optimizer=_own_adagrad)


def _scheduled(cfg: Config) -> Config:
    return cfg.model_copy(update={"scheduler": Scheduler(name="linear", warmup_steps=_WARMUP, total_steps=STEPS)})


def _scheduler(model: nn.Module, data: list[list[dict[str, Any]]], cfg: Config, cell: Cell) -> Curve:
    return oracle.train(model, data, _scheduled(cfg), world=cell.world, optimizer=_own)


def _scheduler_function(model: nn.Module, data: list[list[dict[str, Any]]], cfg: Config, cell: Cell) -> Curve:
    return oracle.train(model, data, _scheduled(cfg), world=cell.world)


FEATURES = (
    Feature(
        "adam",
        "Adam with L2 weight decay, some parameters without it",
        {"optimizer": {"name": "adam", "lr": 3e-3, "weight_decay": 0.1, "no_decay": ["bias", "norm", "scale"]}},
        precisions=("fp32",),
    ),
    Feature(
        "adagrad",
        "Adagrad with another learning rate for the head",
        {
            "optimizer": {
                "name": "adagrad",
                "lr": 1e-2,
                "weight_decay": 0.1,
                "groups": [{"params": ["^head"], "lr": 1e-3}],
            }
        },
    ),
    Feature(
        "lion",
        "Lion, biases without weight decay",
        {"optimizer": {"name": "lion", "lr": 1e-4, "weight_decay": 0.1, "no_decay": ["bias"]}},
        precisions=("fp32",),
    ),
    Feature(
        "groups",
        "SGD with Nesterov's momentum, three learning rates and three weight decays",
        {
            "optimizer": {
                "name": "sgd",
                "lr": 0.1,
                "momentum": 0.9,
                "nesterov": True,
                "weight_decay": 0.1,
                "no_decay": ["bias", "norm", "scale"],
                "groups": [
                    {"params": [r"^blocks\.[01]\."], "lr": 0.02},
                    {"params": ["^head"], "lr": 0.05, "weight_decay": 0.2},
                ],
            }
        },
    ),
    Feature(
        "llama_no_decay",
        "AdamW on a Llama, norms without weight decay, another learning rate for the embedding",
        {
            "optimizer": {
                "lr": 3e-3,
                "weight_decay": 0.1,
                "no_decay": ["norm"],
                "groups": [{"params": ["embed"], "lr": 1e-3}],
            }
        },
        models={"llama": MODELS["llama"]},
        strategies=("shard_optimizer", "full_shard"),
        precisions=("fp32",),
    ),
    Feature(
        "optimizer_object",
        "an AdamW object with amsgrad and two groups, created before sharding",
        {"optimizer": None},
        prepare=_with_object,
        reference=_object,
    ),
    Feature(
        "adagrad_object",
        "an Adagrad object, which has state before its first step",
        {"optimizer": None},
        prepare=_with_adagrad,
        reference=_adagrad,
        precisions=("fp32",),
    ),
    Feature(
        "scheduler_object",
        "a torch scheduler object for an optimizer object",
        {"optimizer": None, "scheduler": None},
        prepare=_with_scheduler,
        reference=_scheduler,
        precisions=("fp32",),
    ),
    Feature(
        "scheduler_function",
        "a torch scheduler created by a function for the config's optimizer",
        {"scheduler": None},
        strategies=("no_shard", "full_shard"),
        prepare=_with_scheduler_function,
        reference=_scheduler_function,
        precisions=("fp32",),
    ),
)
