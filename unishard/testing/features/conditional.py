"""Modules that a rank may skip: experts behind a router, and a tower that only some samples need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from unishard.testing.cells import Feature
from unishard.testing.models import MlpOutput, TestModel

_WIDTH, _CLASSES = 13, 5


class Expert(nn.Module):
    """One of several small networks."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """`(samples, width)` to the same."""
        return self.down(functional.gelu(self.up(x)))  # type: ignore[no-any-return]


class Routed(nn.Module):
    """A residual block that sends each sample to one of its experts, and runs only those that have samples."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width, 7) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, width)` to the same."""
        normed = self.norm(x)
        weights = self.router(normed).softmax(-1)
        weight, chosen = weights.max(-1)
        change = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            rows = (chosen == index).nonzero().squeeze(-1)
            change = change.index_add(0, rows, self.experts[index](normed[rows]) * weight[rows, None])
        return x + change


class Mixture(nn.Module):
    """Two blocks of four experts each; with two samples per rank, most experts get no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(_WIDTH, 11)
        self.blocks = nn.ModuleList(Routed(11, 4) for _ in range(2))
        self.head = nn.Linear(11, _CLASSES)

    def forward(self, x: Tensor, labels: Tensor, **unused: Any) -> MlpOutput:
        """Loss of a batch: `x` is `(batch, 13)`, `labels` `(batch,)`."""
        hidden = self.inp(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return MlpOutput(functional.cross_entropy(logits.float(), labels), logits)


class Tower(nn.Module):
    """A tower for the samples with a picture. Its layers would be units if some ranks did not skip it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Expert(_WIDTH, 9) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """`(samples, 13)` to the same."""
        for layer in self.layers:
            x = x + layer(x)
        return x


class Pictures(nn.Module):
    """Runs its tower first, only on the samples with a picture, and only if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.blocks = nn.ModuleList(Expert(_WIDTH, 7) for _ in range(2))
        self.head = nn.Linear(_WIDTH, _CLASSES)

    def forward(self, x: Tensor, labels: Tensor, picture: Tensor) -> MlpOutput:
        """Loss of a batch: `x` is `(batch, 13)`, `labels` and `picture` (0 or 1) `(batch,)`."""
        rows = picture.nonzero().squeeze(-1)
        if len(rows):
            x = x.index_add(0, rows, self.tower(x[rows]))
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        return MlpOutput(functional.cross_entropy(logits.float(), labels), logits)


def _built(kind: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return kind()


def _mixture() -> nn.Module:
    return _built(Mixture)


def _pictures() -> nn.Module:
    return _built(Pictures)


def _sample(index: int) -> dict[str, Tensor]:
    """A sample by index.

    Every fifth pair (a rank's micro-batch) has pictures, so that ranks differ and some steps have none.
    """
    generator = torch.Generator().manual_seed(500 + index)
    x = torch.randn(_WIDTH, generator=generator)
    return {"x": x, "labels": x[:_CLASSES].argmax(), "picture": torch.tensor(int(index // 2 % 5 == 0))}


CONDITIONAL_MODELS = {"mixture": TestModel(_mixture, _sample), "pictures": TestModel(_pictures, _sample)}

FEATURES = (
    Feature(
        "routed_experts",
        "ranks route their samples to different experts, which are conditional modules",
        {"sharding": {"conditional_modules": ["Expert"]}},
        models={"mixture": CONDITIONAL_MODELS["mixture"]},
    ),
    Feature(
        "skipped_tower",
        "some ranks, and in some steps all ranks, skip a tower, which is a conditional module",
        {"sharding": {"conditional_modules": ["Tower"]}},
        models={"pictures": CONDITIONAL_MODELS["pictures"]},
    ),
)
