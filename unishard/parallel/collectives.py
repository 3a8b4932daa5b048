"""Collectives inside a forward, with their backward; and gradients that count more or less than once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unishard.parallel.groups import Groups

Linear = Callable[[Tensor], Tensor]


class _Linear(torch.autograd.Function):
    """A linear function of a tensor, and the one that the gradient goes through."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, there: Linear, back: Linear) -> Tensor:
        ctx.back = back
        return there(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.back(gradient), None, None


class _Reach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, *weights: Tensor) -> Tensor:
        ctx.like = [(weight.shape, weight.dtype, weight.device) for weight in weights]
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def all_to_all(rows: Tensor, receive: Sequence[int], send: Sequence[int], group: Groups) -> Tensor:
    """Send rows to the ranks of a group, and get theirs: `send[n]` to the n-th, `receive[n]` from it. Collective."""
    return _through(rows, partial(_exchanged, receive, send, group), partial(_exchanged, send, receive, group))


def copied(values: Tensor, group: Groups) -> Tensor:
    """The same tensor, of which each rank uses a part: its gradient is the sum of theirs. Collective in backward."""
    return _through(values, _same, partial(_added, group))


def summed(values: Tensor, group: Groups) -> Tensor:
    """The sum of the ranks' tensors, which all of them use alike. Collective."""
    return _through(values, partial(_added, group), _same)


def gathered(values: Tensor, group: Groups) -> Tensor:
    """The ranks' tensors, joined along the last dimension; all of them use it alike. Collective."""
    return _through(values, partial(_joined, group), partial(_own_part, group))


def split(values: Tensor, group: Groups) -> Tensor:
    """This rank's part of the last dimension of a tensor that all ranks have. Collective in backward."""
    return _through(values, partial(_own_part, group), partial(_joined, group))


def scale_gradient(values: Tensor, factor: float) -> Tensor:
    """The same tensor, with its gradient multiplied."""
    return values if factor == 1 else _through(values, _same, partial(torch.mul, other=factor))


def _through(values: Tensor, there: Linear, back: Linear) -> Tensor:
    return _Linear.apply(values, there, back)  # type: ignore[no-untyped-call,no-any-return]


def _same(values: Tensor) -> Tensor:
    return values.view_as(values)


def _exchanged(receive: Sequence[int], send: Sequence[int], group: Groups, rows: Tensor) -> Tensor:
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    group.all_to_all(received, rows.contiguous(), [*receive], [*send])
    return received


def _added(group: Groups, values: Tensor) -> Tensor:
    values = values.clone(memory_format=torch.contiguous_format)
    group.all_reduce(values)
    return values


def _joined(group: Groups, values: Tensor) -> Tensor:
    parts = values.new_empty((group.size * len(values), *values.shape[1:]))
    group.all_gather(parts, values.contiguous())
    return parts.view(group.size, *values.shape).movedim(0, -2).flatten(-2)


def _own_part(group: Groups, values: Tensor) -> Tensor:
    return values.chunk(group.size, -1)[group.number].contiguous()


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
