"""Collectives inside a forward, with their backward; and gradients that count more or less than once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, receive: list[int], send: list[int], group: Any) -> Tensor:
        ctx.arguments = send, receive, group
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Rows.apply(gradient, *ctx.arguments), None, None, None  # type: ignore[no-untyped-call]


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


class _Reach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, *weights: Tensor) -> Tensor:
        ctx.like = [(weight.shape, weight.dtype, weight.device) for weight in weights]
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def all_to_all(rows: Tensor, receive: Sequence[int], send: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send rows to the ranks of a group, and get theirs: `send[n]` to the n-th, `receive[n]` from it. Collective."""
    return _Rows.apply(rows, list(receive), list(send), group)  # type: ignore[no-untyped-call,no-any-return]


def scale_gradient(values: Tensor, factor: float) -> Tensor:
    """The same tensor, with its gradient multiplied."""
    return values if factor == 1 else _Scale.apply(values, factor)  # type: ignore[no-untyped-call]


def reach(values: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The same tensor, whose backward gives these weights a gradient: of zeros where they get no other."""
    return _Reach.apply(values, *weights)  # type: ignore[no-untyped-call,no-any-return]


@contextmanager
def seen_as(module: nn.Module, change: Callable[[Tensor], Tensor], names: Sequence[str]) -> Iterator[None]:
    """A block in which a module's forward finds changed tensors in the place of its parameters."""
    parameters: dict[str, Any] = vars(module)["_parameters"]
    own = {name: parameters[name] for name in names}
    try:
        parameters.update((name, change(parameter)) for name, parameter in own.items())
        yield
    finally:
        parameters.update(own)
