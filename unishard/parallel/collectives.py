"""Collectives inside a forward, with their backward; and gradients that count more or less than once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _added(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        return _added(values, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _joined(values, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _own_part(gradient, ctx.group), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _own_part(values, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _joined(gradient, ctx.group), None


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


def copied(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same tensor, of which each rank uses a part: its gradient is the sum of theirs. Collective in backward."""
    return _Copy.apply(values, group)  # type: ignore[no-untyped-call,no-any-return]


def summed(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' tensors, which all of them use alike. Collective."""
    return _Sum.apply(values, group)  # type: ignore[no-untyped-call,no-any-return]


def gathered(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ranks' tensors, joined along the last dimension; all of them use it alike. Collective."""
    return _Join.apply(values, group)  # type: ignore[no-untyped-call,no-any-return]


def split(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the last dimension of a tensor that all ranks have. Collective in backward."""
    return _Split.apply(values, group)  # type: ignore[no-untyped-call,no-any-return]


def _added(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    values = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(values, group=group)
    return values


def _joined(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    parts = values.new_empty((size * len(values), *values.shape[1:]))
    dist.all_gather_into_tensor(parts, values.contiguous(), group=group)
    return parts.view(size, *values.shape).movedim(0, -2).flatten(-2)


def _own_part(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    return values.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)].contiguous()


def scale_gradient(values: Tensor, factor: float) -> Tensor:
    """The same tensor, with its gradient multiplied."""
    return values if factor == 1 else _Scale.apply(values, factor)  # type: ignore[no-untyped-call]


def reach(values: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The same tensor, whose backward gives these weights a gradient: of zeros where they get no other."""
    return _Reach.apply(values, *weights)  # type: ignore[no-untyped-call,no-any-return]


@contextmanager
def seen_as(module: nn.Module, changes: Mapping[str, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """A block in which a module's forward finds changed tensors in the place of some of its parameters."""
    parameters: dict[str, Any] = vars(module)["_parameters"]
    own = {name: parameters[name] for name in changes}
    try:
        parameters.update((name, changes[name](parameter)) for name, parameter in own.items())
        yield
    finally:
        parameters.update(own)
