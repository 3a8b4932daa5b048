"""What the own modules are built of, and their data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dev.models.case import Batch, Case, Kind, drawn, seeded

__all__ = ["CLASSES", "WIDTH", "WORDS", "Block", "Classifier", "add", "features", "own_cross_entropy", "stack", "words"]

WIDTH, CLASSES, WORDS = 12, 5, 50
_LENGTH = 6


class Block(nn.Module):
    """A residual block, which `sharding.units: auto` takes as a unit."""

    def __init__(self, width: int = WIDTH, hidden: int = 20) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """A body, and a head over the mean of what it returns."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(1))


def stack(count: int = 2) -> nn.Sequential:
    """Blocks in a row."""
    return nn.Sequential(*(Block() for _ in range(count)))


def features(*shape: int) -> Callable[[int], Batch]:
    """Numbers of a shape; by default a sequence of them."""
    return lambda index: {"x": drawn(index).normal(*shape or (_LENGTH, WIDTH)), "label": torch.tensor(index % CLASSES)}


def words(count: int = WORDS) -> Callable[[int], Batch]:
    """Indices of words."""
    return lambda index: {"x": drawn(index).integers(0, count, _LENGTH), "label": torch.tensor(index % CLASSES)}


def own_cross_entropy(model: Any, batch: Batch) -> Tensor:
    """The loss, computed outside the model."""
    return functional.cross_entropy(model(batch["x"]).float(), batch["label"])


def add(
    kind: Kind, name: str, body: Callable[[], nn.Module], sample: Callable[[int], Batch] | None = None, **more: Any
) -> None:
    """Add a classifier with a body."""
    given: dict[str, Any] = {"loss": own_cross_entropy} | more
    kind.cases.append(Case(name, seeded(_classifier, body), sample or features(), **given))


def _classifier(body: Callable[[], nn.Module]) -> nn.Module:
    return Classifier(body())
