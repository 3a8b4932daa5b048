"""Collectives in a group with gradients."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import Tensor

from unishard.sequence.group import SequenceGroup


def heads_for_positions(tensor: Tensor, group: SequenceGroup) -> Tensor:
    """From some positions of all heads to all positions of some heads, by all-to-all.

    Args:
        tensor: `[batch, heads, positions, dim]`; the heads are a multiple of the group's size.
        group: The ranks that exchange.

    Returns:
        `[batch, heads / size, positions * size, dim]`, positions in the order of the ranks.
    """
    return _AllToAll.apply(tensor, group, 1, 2)  # type: ignore[no-any-return, no-untyped-call]


def positions_for_heads(tensor: Tensor, group: SequenceGroup) -> Tensor:
    """The opposite of `heads_for_positions`."""
    return _AllToAll.apply(tensor, group, 2, 1)  # type: ignore[no-any-return, no-untyped-call]


def repeats_to_divide(fewer: int, heads: int, size: int) -> int:
    """How often each of the heads that others share, `fewer` than `heads`, is sent so that all divide by a size."""
    repeats = size // gcd(fewer, size)
    return repeats if heads % (fewer * repeats) == 0 else heads // fewer


def gather_positions(tensor: Tensor, group: SequenceGroup) -> Tensor:
    """All positions of a `[batch, heads, positions, dim]`, in the order of the ranks, by all-gather.

    Its gradient is the sum over the ranks.
    """
    return _Gather.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call]


def gather_plain(tensor: Tensor, group: SequenceGroup) -> list[Tensor]:
    """The tensors of all ranks, of one shape, without gradients."""
    tensor = tensor.contiguous()
    everyones = [torch.empty_like(tensor) for _ in range(group.size)]
    group.all_gather(everyones, tensor)
    return everyones


def _exchanged(tensor: Tensor, group: SequenceGroup, dim: int) -> Tensor:
    """Send the n-th chunk along `dim` to the n-th rank; returns what was received, stacked."""
    sent = torch.stack([chunk.contiguous() for chunk in tensor.chunk(group.size, dim)])
    received = torch.empty_like(sent)
    group.all_to_all(received, sent)
    return received


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: SequenceGroup, split: int, join: int) -> Tensor:
        ctx.group, ctx.split, ctx.join = group, split, join
        return torch.cat(list(_exchanged(tensor, group, split)), join)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        exchanged = _AllToAll.apply(gradient, ctx.group, ctx.join, ctx.split)  # type: ignore[no-untyped-call]
        return exchanged, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return torch.cat(gather_plain(tensor, group), 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # In fp32 or more, of what all-to-all brings: as many bytes as reduce-scatter, and no rounding between terms.
        precise = torch.promote_types(gradient.dtype, torch.float32)
        return _exchanged(gradient, ctx.group, 2).sum(0, dtype=precise).to(gradient.dtype), None
