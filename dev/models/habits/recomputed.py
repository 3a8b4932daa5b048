"""Blocks that write buffers in their forward, and recompute it in backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dev.models.case import Kind
from dev.models.habits.blocks import WIDTH, Block, add

__all__ = ["KIND"]

KIND = Kind("Own modules: buffers and recomputation")


class _Normalized(Block):
    """A running mean of what comes in, which is subtracted."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean((0, 1)).to(self.mean.dtype), 0.3)
        return super().forward(x - self.mean.to(x.dtype))


class _Coded(Block):
    """A codebook that moves to what is nearest to it."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        own = x.detach().float().mean(1)
        nearest = torch.cdist(own, self.codes.float()).argmin(1)
        read = self.codes[nearest].to(x.dtype)
        self.codes.data[nearest] = self.codes[nearest].lerp(own.to(self.codes.dtype), 0.3)
        return super().forward(x + 0.5 * read[:, None])


class _Balanced(Block):
    """Two experts, of which a sample goes to that with fewer samples so far."""

    samples: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("samples", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, 0, :1].detach() + (self.samples[1] - self.samples[0]).to(x.dtype) > 0
        self.samples += torch.stack([first.sum(), (~first).sum()])
        return super().forward(x + torch.where(first[:, None], self.experts[0](x), self.experts[1](x)))


def _spectral() -> Block:
    block = Block()
    parametrizations.spectral_norm(block.up)
    return block


def _add(name: str, block: Callable[[], nn.Module]) -> None:
    add(
        KIND,
        f"{name}, recomputed",
        lambda: nn.Sequential(block(), block(), block()),
        sections={"activation_checkpointing": "full"},
        low_buffers=True,
    )


_add("a running mean", _Normalized)
_add("spectral norm", _spectral)
_add("a codebook", _Coded)
_add("counts of experts", _Balanced)
