"""Norm, division and clipping of sharded or replicated gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from unishard.contract.kit.grad_norm import multiply, norm_of


def total_norm(gradients: Sequence[tuple[int, list[Tensor]]], device: torch.device) -> Tensor:
    """Global L2 norm, an fp32 scalar on `device`, equal on all ranks. Collective unless every rank holds all gradients.

    Uses local shards: one collective of one number instead of DTensor's dispatch per gradient. It reduces over all
    ranks even if groups each hold a copy, so that the norm is bit-equal and all ranks clip and skip alike.

    Args:
        gradients: A number of copies over all ranks, and this rank's shards of which there are so many; and others.
        device: Where this rank computes.
    """
    (copies, shards), *others = gradients
    norm = norm_of(shards).to(device) if shards else torch.zeros((), device=device)
    world = dist.get_world_size()
    if copies == world and not others:
        return norm
    square = norm.double().square()
    for number, some in others:  # a part of each rank's: they are counted once, and the norm has the same bits on all
        square += norm_of(some).to(device).double().square() * (copies / number)
    if world > 1:
        dist.all_reduce(square)
    return (square / copies).sqrt().float()


class _Graded(NamedTuple):
    """All that `clip_grads_with_norm_` asks of a parameter (torch 2.11 to 2.15)."""

    grad: Tensor


def changes(norm: float, max_norm: float | None, divisor: float) -> bool:
    """Whether `scale` would multiply by another number than 1.

    Args:
        norm: That of the divided gradients, an fp32 number that the host has read.
        max_norm: None for no clipping.
        divisor: The divisor, mostly 1.
    """
    return divisor != 1 or (max_norm is not None and bool(_factor(torch.tensor(norm), max_norm) != 1))


def _factor(norm: Tensor, max_norm: float) -> Tensor:
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def scale(gradients: list[Tensor], norm: Tensor, max_norm: float | None, divisor: float) -> None:
    """Divide gradients and clip them to `max_norm` in place, as `torch.nn.utils.clip_grad_norm_` does (torch 2.13).

    Args:
        gradients: The gradients before division, on one device.
        norm: The norm of all after division.
        max_norm: None for no clipping.
        divisor: The divisor, mostly 1.
    """
    if not gradients or (max_norm is None and divisor == 1):
        return
    if max_norm is not None and divisor == 1 and gradients[0].device.type != "cpu":  # one kernel for many tensors
        clip_grads_with_norm_(cast(Any, [_Graded(gradient) for gradient in gradients]), max_norm, norm)
        return
    factor = torch.ones_like(norm) if max_norm is None else _factor(norm, max_norm)
    multiply(gradients, (factor / divisor).to(gradients[0].device))
