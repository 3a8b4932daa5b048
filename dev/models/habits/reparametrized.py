"""Weights that are computed from others."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

from dev.models.case import Kind
from dev.models.habits.blocks import WIDTH, WORDS, Block, add, stack, words
from dev.models.habits.layers import Embedded

__all__ = ["KIND"]

KIND = Kind("Own modules: computed weights")


class _Layers(nn.Module):
    def __init__(self, of: Callable[[nn.Module], nn.Module], count: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(_quiet(of, nn.Linear(WIDTH, WIDTH)) for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def _quiet(of: Callable[[nn.Module], nn.Module], module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the older functions, which people have
        return of(module)


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def _symmetric(module: nn.Module) -> nn.Module:
    parametrize.register_parametrization(module, "weight", _Symmetric())
    return module


add(KIND, "weight norm", lambda: _Layers(parametrizations.weight_norm))
add(KIND, "weight norm of nn.utils", lambda: _Layers(nn.utils.weight_norm))
add(KIND, "spectral norm", lambda: _Layers(parametrizations.spectral_norm), low_buffers=True)
add(KIND, "spectral norm of nn.utils", lambda: _Layers(nn.utils.spectral_norm), low_buffers=True)
add(KIND, "orthogonal weights", lambda: _Layers(parametrizations.orthogonal, 2))
add(KIND, "an own parametrization", lambda: _Layers(_symmetric))
add(
    KIND,
    "weight norm of an embedding",
    lambda: Embedded(parametrizations.weight_norm(nn.Embedding(WORDS, WIDTH))),
    words(),
)
add(
    KIND,
    "spectral norm of an embedding",
    lambda: Embedded(_quiet(nn.utils.spectral_norm, nn.Embedding(WORDS, WIDTH))),
    words(),
    low_buffers=True,
)


class _FunctionalCall(nn.Module):
    """An inner step of meta-learning: a layer with other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.blocks = stack()

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: 0.9 * parameter for name, parameter in self.layer.named_parameters()}
        return self.blocks(functional_call(self.layer, weights, (x,)))


add(KIND, "functional_call with other weights", _FunctionalCall)


class _Hypernetwork(nn.Module):
    """Blocks, each a unit, with a weight that another layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.code, self.weights = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, 20 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            weight = self.weights(self.code.to(x)).view(WIDTH, 20)
            x = block(functional_call(block, {"down.weight": weight}, (x,)))
        return x


add(KIND, "functional_call of a block with weights of a hypernetwork", _Hypernetwork)
