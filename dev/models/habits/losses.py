"""Losses that do more than one forward, or read more than its output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dev.models.case import Batch, Kind
from dev.models.habits.blocks import WIDTH, Block, add, own_cross_entropy, stack

__all__ = ["KIND"]

KIND = Kind("Own modules: losses")


def _module(model: Any) -> nn.Module:
    """The module of an engine, or the model itself."""
    found: nn.Module = model if isinstance(model, nn.Module) else model.module
    return found


def _two_forwards(model: Any, batch: Batch) -> Tensor:
    one, other = model(batch["x"]).float(), model(batch["x"] * 0.5 + 0.1).float()
    return functional.cross_entropy(one, batch["label"]) + (one - other).square().mean()


def _target_first(model: Any, batch: Batch) -> Tensor:
    with torch.no_grad():
        target = model(batch["x"] * 0.9).float()
    output = model(batch["x"]).float()
    return functional.cross_entropy(output, batch["label"]) + (output - target).square().mean()


def _target_last(model: Any, batch: Batch) -> Tensor:
    output = model(batch["x"]).float()
    with torch.no_grad():
        target = model(batch["x"] * 0.9).float()
    return functional.cross_entropy(output, batch["label"]) + (output - target).square().mean()


def _gradient_of_input(model: Any, batch: Batch) -> Tensor:
    return own_cross_entropy(model, batch | {"x": batch["x"].clone().requires_grad_()})


def _in_fp64(model: Any, batch: Batch) -> Tensor:
    return own_cross_entropy(model, batch).double()


add(KIND, "two forwards, one backward", lambda: stack(3), loss=_two_forwards)
add(KIND, "a forward under no_grad, then one with gradients", lambda: stack(3), loss=_target_first)
add(KIND, "a forward with gradients, then one under no_grad", lambda: stack(3), loss=_target_last)
add(KIND, "an input that requires a gradient", stack, loss=_gradient_of_input)
add(KIND, "a loss in fp64", stack, loss=_in_fp64)


def _penalty(model: Any, batch: Batch) -> Tensor:
    return own_cross_entropy(model, batch) + 1e-2 * sum(
        parameter.abs().sum() for parameter in _module(model).parameters()
    )


def _weight_of_unit(model: Any, batch: Batch) -> Tensor:
    return own_cross_entropy(model, batch) + 0.1 * _module(model).body[0].up.weight.square().sum()


def _part_of_model(model: Any, batch: Batch) -> Tensor:
    output = model(batch["x"])
    part = _module(model).body(batch["x"].to(output.dtype) * 0.5)
    return functional.cross_entropy(output.float(), batch["label"]) + part.float().square().mean()


add(KIND, "an L1 penalty over all parameters", stack, loss=_penalty)
add(KIND, "a penalty on the weight of a unit", stack, loss=_weight_of_unit)
add(KIND, "a part of the model called by the loss", stack, loss=_part_of_model)


class _Penalized(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.up.weight.square().sum()


class _OwnPenalty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Penalized() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, penalty = layer(x)
            x = x + 1e-2 * penalty
        return x


add(KIND, "a penalty that a unit computes of its own weight", _OwnPenalty)


_LOSSES: list[Tensor] = []


class _Scaled(Block):
    """Puts a loss into a global list, after it has computed its output."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        _LOSSES.append((self.scale * output).float().square().mean())
        return output


def _with_global(model: Any, batch: Batch) -> Tensor:
    _LOSSES.clear()
    return own_cross_entropy(model, batch) + 0.1 * sum(_LOSSES)


add(
    KIND,
    "losses that blocks put into a global list",
    lambda: nn.Sequential(*(_Scaled() for _ in range(3))),
    loss=_with_global,
)
