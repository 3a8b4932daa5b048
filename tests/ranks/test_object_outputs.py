"""Modules that return something else than tensors in lists, tuples and dicts."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any, NamedTuple

import torch
from harness import BACKENDS, Scenario, config, in_ranks, refused
from mistakes.forwards import WIDTH, Block
from torch import nn
from torch.distributions import Normal

import unishard


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
    return {"x": torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))}


RETURNING = {
    kind: Scenario(Model, (how,), inputs, lambda model, batch: model(**batch).hidden, micro_batches=3)
    for kind, how in KINDS.items()
}
"""In the later updates, stage 3 gathers ahead."""
CELLS = (
    *((backend, kind, "none") for kind, how in KINDS.items() for backend in how.on),
    *((backend, kind, "full") for backend in BACKENDS for kind in ("dataclass", "object")),
)


@in_ranks(cells=CELLS)
def test_what_modules_return_trains_as_in_plain_torch(backend, kind, checkpointing):
    sharding = {"strategy": "full_shard", "units": ["Returning"]}
    RETURNING[kind].judge(config(backend, sharding, activation_checkpointing=checkpointing))


@in_ranks
def test_a_generator_is_refused_where_weights_are_gone_when_it_runs():
    kind = Kind(lambda x: (each for each in [x]), lambda output: next(iter(output)))
    with unishard.prepare(Model(kind), config("deepspeed", "full_shard")) as engine:
        said = refused(engine, torch.ones(4, WIDTH))
    assert said.startswith("ModelError: blocks.0 (Returning) returns a generator, whose code runs after the forward")
