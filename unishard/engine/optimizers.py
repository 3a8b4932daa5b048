"""Builds the torch optimizer: that of the config, or that of a caller's factory, which is checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unishard import config
from unishard.backend import OptimizerFactory
from unishard.errors import ConfigError, Problem

__all__ = ["checked", "factory"]

_WHOLE_TENSORS = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)
"""Their update of one element depends on others of its tensor, so that of a shard would be another (torch 2.13)."""


def factory(cfg: config.Optimizer) -> OptimizerFactory:
    """A function from trainable parameters to the optimizer that the config names.

    Fused, which is one kernel a step, on CPU and CUDA; except SGD on FSDP2's DTensor shards, where torch 2.13 has none
    ("Operator aten._fused_sgd_.default does not have a sharding strategy registered").
    """

    def build(params: Iterable[Tensor]) -> torch.optim.Optimizer:
        params = list(params)
        common: dict[str, Any] = {"lr": cfg.lr, "weight_decay": cfg.weight_decay}
        match cfg.name:
            case "adamw":
                return torch.optim.AdamW(params, betas=cfg.betas, eps=cfg.eps, fused=True, **common)
            case "sgd":
                fused = not any(isinstance(parameter, DTensor) for parameter in params)
                return torch.optim.SGD(params, momentum=cfg.momentum, fused=fused, **common)

    return build


def checked(build: OptimizerFactory, *, sharded: bool) -> OptimizerFactory:
    """The same factory, which refuses to return what would not train the model as asked.

    Args:
        build: A caller's factory.
        sharded: Whether the optimizer will see only parts of tensors.
    """
    if not callable(build):
        _refuse(f"is a {type(build).__name__}; pass a function that builds one, such as lambda params: torch.optim.Adam(params, lr=1e-3)")

    def build_checked(params: Iterable[Tensor]) -> torch.optim.Optimizer:
        params = list(params)
        optimizer: object = build(params)
        if not isinstance(optimizer, torch.optim.Optimizer):
            _refuse(f"factory returned {type(optimizer).__name__}; it must return a torch.optim.Optimizer")
        if sharded and isinstance(optimizer, _WHOLE_TENSORS):
            _refuse(f"{type(optimizer).__name__} works on whole tensors, and each rank holds a part; choose no_shard or another optimizer")
        given = {id(parameter) for parameter in params}
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if held - given:
            _refuse(f"factory took {len(held - given)} parameters that it was not given; build it from its argument alone")
        if given - held:
            _refuse(f"factory left out {len(given - held)} of {len(given)} trainable parameters; freeze those with requires_grad_(False)")
        return optimizer

    return build_checked


def _refuse(what: str) -> NoReturn:
    raise ConfigError([Problem("optimizer", what)])
