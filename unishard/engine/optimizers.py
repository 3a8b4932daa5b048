"""Builds the torch optimizer of the config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from unishard import config
from unishard.backend import OptimizerFactory

__all__ = ["factory"]


def factory(cfg: config.Optimizer) -> OptimizerFactory:
    """A function from trainable parameters to the optimizer that the config names.

    AdamW is fused: one kernel a step, on CPU and CUDA. SGD is not: torch 2.13 has no fused SGD for the DTensor shards of FSDP2
    ("Operator aten._fused_sgd_.default does not have a sharding strategy registered").
    """

    def build(params: Iterable[Tensor]) -> torch.optim.Optimizer:
        common: dict[str, Any] = {"lr": cfg.lr, "weight_decay": cfg.weight_decay}
        match cfg.name:
            case "adamw":
                return torch.optim.AdamW(params, betas=cfg.betas, eps=cfg.eps, fused=True, **common)
            case "sgd":
                return torch.optim.SGD(params, momentum=cfg.momentum, **common)

    return build
