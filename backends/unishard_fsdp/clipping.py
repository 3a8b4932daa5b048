"""Norm, division and clipping of gradients that are in parts or whole."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from unishard.engine.optim.grad_norm import multiply, norm_of

__all__ = ["local", "scale", "total_norm"]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor. Call it under `no_grad`, where it costs no autograd node."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def total_norm(gradients: list[Tensor], device: torch.device, *, copies: int) -> Tensor:
    """Global L2 norm, an fp32 scalar on `device`, the same on every rank. Collective unless every rank holds a copy.

    Works on the local parts: one collective of one number instead of DTensor's dispatch for each gradient. It goes over all ranks
    also where groups of them hold a copy each, so that all take the same decision about clipping and skipping to the last bit.

    Args:
        gradients: What this rank holds of them.
        device: Where this rank computes.
        copies: How often all ranks together hold each gradient.
    """
    norm = norm_of(gradients).to(device) if gradients else torch.zeros((), device=device)
    if copies == dist.get_world_size():
        return norm
    square = norm.double().square()
    dist.all_reduce(square)
    return (square / copies).sqrt().float()


def scale(gradients: list[Tensor], norm: Tensor, max_norm: float | None, divisor: float) -> None:
    """Divide gradients, and scale them down to `max_norm` by the formula of `torch.nn.utils.clip_grad_norm_` (torch 2.13), in place.

    Args:
        gradients: Before division.
        norm: Theirs after division.
        max_norm: None for no clipping.
        divisor: Mostly 1.
    """
    if not gradients or (max_norm is None and divisor == 1):
        return
    factor = torch.ones_like(norm) if max_norm is None else torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    multiply(gradients, (factor / divisor).to(gradients[0].device))
