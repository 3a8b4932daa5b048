"""Modules that return something else than tensors in lists, tuples and dicts."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from harness import BACKENDS, config, in_ranks, my_rank, play, refused, values
from mistakes.forwards import WIDTH, Block
from torch import nn
from torch.distributions import Normal

import unishard

UPDATES = 3
"""In the later ones, stage 3 gathers ahead."""


@dataclasses.dataclass
class Fields:
    hidden: Any
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: Any


class Own:
    def __init__(self, hidden):
        self.hidden = hidden


class Called(Own):
    def __call__(self):
        return self.hidden


class Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


class Kind(NamedTuple):
    """How a block returns a tensor, and how its caller takes it."""

    make: Any
    take: Any
    on: tuple[str, ...] = BACKENDS


def hidden(output):
    return output.hidden


KINDS = {
    "dataclass": Kind(Fields, hidden),
    "frozen dataclass": Kind(Frozen, hidden),
    "dataclass in a tuple": Kind(lambda x: (Fields(x), 3), lambda output: output[0].hidden),
    "dataclass in a dict": Kind(lambda x: {"of": Fields(x)}, lambda output: output["of"].hidden),
    "object": Kind(Own, hidden),
    "object in an object": Kind(lambda x: Own(Own([x])), lambda output: output.hidden.hidden[0]),
    "callable object": Kind(Called, lambda output: output(), ("deepspeed",)),
    "slots": Kind(Slots, hidden, ("deepspeed",)),
    "distribution": Kind(lambda x: Normal(x, 1.0), lambda output: output.mean),
    "numbers as keys": Kind(lambda x: {0: x}, lambda output: output[0]),
    "user dict": Kind(lambda x: UserDict(x=x), lambda output: output["x"]),
}
CELLS = tuple((backend, kind) for kind, how in KINDS.items() for backend in how.on)


class Returning(Block):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x + super().forward(x))


class Plain(nn.Module):
    """Returns no tensor."""

    def forward(self, x):
        return {2: len(x), 3: True, 5: "text", 7: x.shape, 11: x.dtype}[self.number]


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(7)
        self.kind = kind
        self.blocks = nn.ModuleList(Returning(kind.make) for _ in range(3))
        self.plain = nn.ModuleList(Plain() for _ in range(5))
        for number, part in zip((2, 3, 5, 7, 11), self.plain, strict=True):
            part.number = number
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        size, *_ = [part(x) for part in self.plain]
        for block in self.blocks:
            x = self.kind.take(block(x))
        return Own(self.head(x).square().sum() / size)


def inputs(number, rank):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))


def trained(backend, kind, checkpointing="none"):
    sharding = {"strategy": "full_shard", "units": ["Returning"]}
    found = []
    with unishard.prepare(
        Model(KINDS[kind]), config(backend, sharding, activation_checkpointing=checkpointing)
    ) as engine:
        for number in range(UPDATES):
            engine.backward(engine(inputs(number, my_rank())).hidden)
            found.append(engine.step().grad_norm)
    return found


@cache
def plain(kind):
    model, found = Model(KINDS[kind]), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(UPDATES):
        (sum(model(inputs(number, rank)).hidden for rank in range(2)) / 2).backward()
        found.append(nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
    return found


CHECKPOINTED = tuple((backend, kind, "full") for backend in BACKENDS for kind in ("dataclass", "object"))
SCENARIOS = tuple((trained, cell) for cell in (*CELLS, *CHECKPOINTED))


@pytest.mark.parametrize("cell", [*CELLS, *CHECKPOINTED], ids=lambda cell: "-".join(map(str, cell)))
def test_what_modules_return_trains_as_in_plain_torch(cell):
    for found in values(play(SCENARIOS)[trained, cell]):
        assert found == pytest.approx(plain(cell[1]), rel=1e-5)


@in_ranks
def test_a_generator_is_refused_where_weights_are_gone_when_it_runs():
    kind = Kind(lambda x: (each for each in [x]), lambda output: next(iter(output)))
    with unishard.prepare(Model(kind), config("deepspeed", "full_shard")) as engine:
        said = refused(engine, inputs(0, my_rank()))
    assert said.startswith("ModelError: blocks.0 (Returning) returns a generator, whose code runs after the forward")
