"""Hooks, functions of autograd, recomputation, units with other signatures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dev.models.case import Kind
from dev.models.habits.blocks import WIDTH, WORDS, Block, add, stack, words
from dev.models.habits.layers import Embedded

__all__ = ["KIND"]

KIND = Kind("Own modules: autograd")


class _Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.3 * gradient


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, torch.einsum("bti,btj->ij", gradient, x)


class _OwnFunctions(Block):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.2 * torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + _Reversal.apply(_Product.apply(x, self.weight))


add(KIND, "own functions of autograd", lambda: nn.Sequential(_OwnFunctions(), _OwnFunctions()))


def _hooked() -> nn.Module:
    blocks = stack()
    blocks[0].register_forward_hook(lambda _, args, output: output * 0.5)
    blocks[1].register_forward_pre_hook(lambda _, args: (args[0] + 0.1,))
    blocks[1].up.register_full_backward_hook(lambda _, into, out: (into[0] * 0.5,))
    blocks[0].up.register_full_backward_hook(lambda _, into, out: (into[0] * 0.7,))
    blocks[1].register_full_backward_pre_hook(lambda _, out: (out[0] * 2,))
    return blocks


add(KIND, "hooks on modules", _hooked)


def _hooked_embedding() -> nn.Module:
    embedding = nn.Embedding(WORDS, WIDTH)
    embedding.register_forward_hook(lambda module, args, output: output + module.weight.square().mean(0))
    return Embedded(embedding)


add(KIND, "a hook that reads the weight of an embedding", _hooked_embedding, words())


class _Recomputed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class _RecomputedWithin(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda y: self.down(self.up(self.norm(y)).relu()), x, use_reentrant=False)


add(KIND, "blocks recomputed by torch.utils.checkpoint", lambda: _Recomputed(reentrant=False))
add(KIND, "blocks recomputed by torch.utils.checkpoint, reentrant", lambda: _Recomputed(reentrant=True))
add(KIND, "a part of a block recomputed", lambda: nn.Sequential(_RecomputedWithin(), _RecomputedWithin()))
add(KIND, "activation_checkpointing: full", lambda: stack(3), sections={"activation_checkpointing": "full"})


class _Structured(Block):
    def forward(self, *, x: Tensor, scale: float) -> Any:
        return super().forward(x) * scale, {"input": x, "none": None}, 3


class _Unstructured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Structured() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total: Any = 0
        for layer in self.layers:
            x, found, _ = layer(x=x, scale=0.9)
            total = total + found["input"]
        return x + 0.1 * total


add(KIND, "units with keyword arguments that return tuples and dicts", _Unstructured)


class _InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu_()).add_(x)


add(KIND, "operations in place", lambda: nn.Sequential(_InPlace(), _InPlace(), _InPlace()))


class _View(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view_as(x), super().forward(x)


class _Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_View() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            before, x = layer(x)
            x = x + 0.1 * before
        return x


add(KIND, "units that return a view of their input", _Views)


class _Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        second = self.layers[1](first.detach())
        return self.layers[2](first) + second


add(KIND, "detached between units", _Detached)


class _FrozenFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack(3)
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](x))


add(KIND, "a frozen block under no_grad", _FrozenFirst)
