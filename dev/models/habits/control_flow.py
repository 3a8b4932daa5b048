"""Modules that are not always run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dev.models.case import Kind
from dev.models.habits.blocks import CLASSES, WIDTH, Block, add, own_cross_entropy

__all__ = ["KIND"]

KIND = Kind("Own modules: control flow")


class _Scheduled(nn.Module):
    """Blocks that depend on the number of the update."""

    update = 0

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(count))


def _tell(module: nn.Module, update: int) -> None:
    for each in module.modules():
        if isinstance(each, _Scheduled):
            each.update = update


class _Reordered(_Scheduled):
    def forward(self, x: Tensor) -> Tensor:
        for index in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1))[self.update % 3]:
            x = self.layers[index](x)
        return x


class _Skipping(_Scheduled):
    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if (index + self.update) % 3:
                x = layer(x)
        return x


class _Detaching(_Scheduled):
    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers
        x = first(x).detach() if self.update % 2 else first(x)
        for layer in others:
            x = layer(x)
        return x


add(KIND, "blocks in another order in each update", _Reordered, before=_tell)
add(KIND, "blocks skipped by the number of the update", _Skipping, before=_tell)
add(KIND, "detached in every second update", lambda: _Detaching(3), before=_tell)


class _ByData(nn.Module):
    """Drops blocks by the data, so each rank others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = int(x.detach()[0, 0, 0].abs() * 1000)
        for index, layer in enumerate(self.layers):
            if index == 0 or (chosen + index) % 2:
                x = layer(x)
        return x


_CONDITIONAL = {"sharding": {"conditional_modules": ["Block"]}}
add(KIND, "blocks skipped by the data", _ByData)
add(KIND, "blocks skipped by the data, conditional_modules", _ByData, sections=_CONDITIONAL)


class TaskHead(nn.Linear):
    """A head of a task."""


class _Tasks(nn.Module):
    """A head for each task; each micro-batch has one task, by its data."""

    def __init__(self, head: type[nn.Linear]) -> None:
        super().__init__()
        self.block = Block()
        self.heads = nn.ModuleDict({"a": head(WIDTH, WIDTH), "b": head(WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["ab"[int(x[0, 0, 0] > 0)]](self.block(x))


add(KIND, "a head for each task, in a ModuleDict", lambda: _Tasks(nn.Linear))
add(
    KIND,
    "a head for each task, conditional_modules",
    lambda: _Tasks(TaskHead),
    sections={"sharding": {"conditional_modules": ["TaskHead"]}},
)


class _Routed(nn.Module):
    """Experts in a loop over those that a token chose."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x.mean(1)).softmax(-1).max(-1)
        total = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            rows = (chosen == index).nonzero().squeeze(-1)
            total = total.index_add(0, rows, self.experts[index](x[rows]) * weights[rows, None, None])
        return x + total


add(KIND, "experts in a loop", _Routed)
add(KIND, "experts in a loop, conditional_modules", _Routed, sections=_CONDITIONAL)


class _EmptyBatches(nn.Module):
    """Every block is run, some on no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        positive = x[:, 0, 0] > 0
        for index, layer in enumerate(self.layers):
            chosen = positive if index % 2 else ~positive
            x = x.index_put((chosen.nonzero().squeeze(-1),), layer(x[chosen]))
        return x


add(KIND, "blocks run on no sample", _EmptyBatches)


class _EarlyExit(nn.Module):
    """Two heads, of which the loss uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.early = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.early(x)
        return x


add(KIND, "a head whose output the loss does not use", _EarlyExit, loss=own_cross_entropy)
