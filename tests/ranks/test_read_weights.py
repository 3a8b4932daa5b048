"""Weights that a script or a forward reads as numbers outside the forward of their modules, as of the whole model."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from harness import BACKENDS, EACH, config, in_ranks, my_rank, play, refused, values
from mistakes.forwards import WIDTH, Block
from torch import nn
from torch.nn.utils import parameters_to_vector

import unishard

STRATEGIES = ("full_shard", "shard_grad_op")
CELLS = tuple(product(BACKENDS, STRATEGIES))


class Scaled(nn.Module):
    """Multiplies its loss by what it reads of a weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, read=None):
        scale = NUMBERS[read]([*self.parameters()][2]) if read else 1.0
        for layer in self.layers:
            x = layer(x)
        return scale * self.head(x).square().mean()


def sparse(weight):
    return int((weight.abs() < 0.1).sum())


NUMBERS = {
    "norm": lambda weight: float(weight.detach().norm()),
    "norm of data": lambda weight: weight.data.norm(2).item(),
    "mean": lambda weight: weight.abs().mean().item(),
    "largest": lambda weight: weight.max().item(),
    "sparsity": lambda weight: sparse(weight) / weight.numel(),
    "finite": lambda weight: float(bool(torch.isfinite(weight).all())),
    "foreach": lambda weight: float(torch._foreach_norm([weight.detach()])[0]),
    "sizes": lambda weight: float(weight.numel() + len(weight) + weight.shape[1] + weight.dim() + weight.nbytes),
}
"""Each of a weight."""
WHOLE = {
    "count": lambda model: sum(each.numel() for each in model.parameters()),
    "norm": lambda model: float(sum(each.detach().square().sum() for each in model.parameters())),
    "one element": lambda model: float(model.head.bias),
}
"""Each of a model."""


def inputs(rank):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def read(backend, strategy, train=True):
    """Before and after an update."""
    with unishard.prepare(Scaled(), config(backend, strategy), train=train) as engine:
        found = [all_of(engine.module)]
        if train:
            engine.backward(engine(inputs(engine.rank)))
            found.append(all_of(engine.module))
            engine.step()
        plain = Scaled()
        plain.load_state_dict(engine.weights.state_dict(all_ranks=True))
        assert engine.module.head.weight.grad is None
        return [*found, all_of(engine.module)], [all_of(Scaled())] * len(found) + [all_of(plain)]


def all_of(model):
    named = {name: act(model.layers[1].up.weight) for name, act in NUMBERS.items()}
    return named | {f"model: {name}": act(model) for name, act in WHOLE.items()}


@pytest.mark.parametrize("train", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_numbers_outside_a_forward_are_those_of_the_whole_weight(cell, train):
    for found, right in values(play(SCENARIOS)[read, (*cell, train)]):
        assert found == [pytest.approx(each, rel=1e-5) for each in right]


def trained(backend, strategy, name):
    with unishard.prepare(Scaled(), config(backend, strategy)) as engine:
        losses = []
        for _ in range(3):  # in the later ones, stage 3 gathers ahead
            losses.append(engine(inputs(engine.rank), name))
            engine.backward(losses[-1])
            engine.step()
        return [engine.mean(loss) for loss in losses]


@cache
def plain(name):
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(3):
        loss = sum(model(inputs(rank), name) for rank in range(2)) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def refused_in_forward(backend, strategy, name):
    with unishard.prepare(Scaled(), config(backend, strategy)) as engine:
        return refused(engine, inputs(engine.rank), name)


READING = tuple(cell for cell in CELLS if cell != ("deepspeed", "full_shard"))
SCENARIOS = (
    *((read, (*cell, train)) for cell in CELLS for train in (True, False)),
    *((trained, (*cell, name)) for cell in READING for name in ("norm", "mean", "sizes")),
    *((refused_in_forward, ("deepspeed", "full_shard", name)) for name in ("norm", "mean", "sizes")),
)


@pytest.mark.parametrize("name", ["norm", "mean", "sizes"])
def test_a_forward_that_reads_a_weight_of_another_module_is_refused_at_stage_3(name):
    for said in values(play(SCENARIOS)[refused_in_forward, ("deepspeed", "full_shard", name)]):
        assert "engine.weights.unsharded" in said


@pytest.mark.parametrize("name", ["norm", "mean", "sizes"])
@pytest.mark.parametrize("cell", READING, ids="-".join)
def test_a_forward_that_reads_them_trains_as_plain_torch(cell, name):
    for found in values(play(SCENARIOS)[trained, (*cell, name)]):
        assert found == pytest.approx(plain(name), rel=1e-5)


def said_of(backend, act):
    """The error that ends a run, with its notes."""
    try:
        with unishard.prepare(Scaled(), config(backend)) as engine:
            act(engine)
    except RuntimeError as error:
        return " ".join((str(error), *getattr(error, "__notes__", ())))
    except unishard.ModelError as error:
        return str(error)
    return "nothing"


@in_ranks(cells=EACH)
def test_what_a_backend_cannot_read_names_what_to_write(backend):
    def in_the_loss(engine):
        engine.backward(engine(inputs(my_rank())) + engine.module.layers[0].up.weight.square().sum())

    said = [
        said_of(backend, lambda engine: engine.module.layers[0].up.weight.tolist()),
        said_of(backend, lambda engine: parameters_to_vector(engine.module.parameters())),
    ]
    assert all("engine.weights.read(name)" in each for each in said) or (backend, said) == (
        "deepspeed",
        ["nothing"] * 2,
    )
    assert "engine.weights.unsharded" in said_of(backend, in_the_loss)
