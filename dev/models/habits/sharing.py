"""Modules and weights that are used more than once."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dev.models.case import Batch, Kind, seeded
from dev.models.habits.blocks import WIDTH, WORDS, Block, add, words

__all__ = ["KIND"]

KIND = Kind("Own modules: shared modules and tied weights")


class _InOrder(nn.Module):
    """Blocks of a list, some of them the same one, in an order."""

    def __init__(self, blocks: int, order: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


class _Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = Block()
        self.layers = nn.Sequential(block, Block(), block, Block(), block)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


add(KIND, "a block that is used three times", lambda: _InOrder(2, (0, 1, 0, 0)))
add(KIND, "the same, recomputed", lambda: _InOrder(2, (0, 1, 0, 0)), sections={"activation_checkpointing": "full"})
add(KIND, "a block that is in a list three times", _Listed)
add(KIND, "blocks in the reverse order", lambda: _InOrder(4, (3, 2, 1, 0)))


class _TiedAcross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.layers[2].down.weight = self.layers[0].down.weight
        self.layers[1].norm = self.layers[0].norm
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def _next_word(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["x"]).float().flatten(0, 1), batch["x"].flatten())


KIND.add("weights tied across units", seeded(_TiedAcross), words(), loss=_next_word)


class _TiedStorage(nn.Module):
    def __init__(self, *, transposed: bool) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        weight = self.encode.weight.data
        self.decode.weight = nn.Parameter(weight.t() if transposed else weight)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.decode(torch.tanh(self.encode(x))))


add(KIND, "two parameters over one storage", lambda: _TiedStorage(transposed=False))
add(KIND, "a parameter over the transposed storage of another", lambda: _TiedStorage(transposed=True))


class _ReadsOther(Block):
    """Reads a weight of another unit, which is no child of it."""

    def __init__(self, other: Block) -> None:
        super().__init__()
        self.other = [other]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + functional.linear(x, self.other[0].up.weight)[..., :WIDTH]


def _reading() -> nn.Module:
    first = Block()
    return nn.Sequential(first, _ReadsOther(first))


add(KIND, "a unit that reads the weight of another", _reading)


class _OfRoot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(functional.linear(x, self.layer.weight, self.layer.bias))


add(KIND, "a child's weight by torch.nn.functional", _OfRoot)
