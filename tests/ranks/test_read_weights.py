"""Weights that a script or a forward reads as numbers outside the forward of their modules, as of the whole model."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from harness import BACKENDS, EACH, Scenario, config, in_ranks, refused
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


def inputs(number, rank):
    return {"x": torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))}


def reading(name=None):
    return Scenario(Scaled, data=inputs, loss=lambda model, batch: model(**batch, read=name), micro_batches=3)


MODEL, NAMES = reading(), ("norm", "mean", "sizes")


@in_ranks(cells=tuple((*cell, train) for cell in CELLS for train in (True, False)))
def test_numbers_outside_a_forward_are_those_of_the_whole_weight(backend, strategy, train):
    """Before and after an update."""
    with unishard.prepare(MODEL.built(), config(backend, strategy), train=train) as engine:
        found = [all_of(engine.module)]
        if train:
            engine.backward(engine(**inputs(0, engine.rank)))
            found.append(all_of(engine.module))
            engine.step()
        plain = Scaled()
        plain.load_state_dict(engine.weights.state_dict(all_ranks=True))
        assert engine.module.head.weight.grad is None
        right = [all_of(MODEL.built())] * len(found) + [all_of(plain)]
        found.append(all_of(engine.module))
    assert found == [pytest.approx(each, rel=1e-5) for each in right]


def all_of(model):
    named = {name: act(model.layers[1].up.weight) for name, act in NUMBERS.items()}
    return named | {f"model: {name}": act(model) for name, act in WHOLE.items()}


@in_ranks(cells=tuple((name,) for name in NAMES))
def test_a_forward_that_reads_a_weight_of_another_module_is_refused_at_stage_3(name):
    with unishard.prepare(MODEL.built(), config("deepspeed", "full_shard")) as engine:
        said = refused(engine, **inputs(0, engine.rank), read=name)
    assert "engine.weights.unsharded" in said


@in_ranks(cells=tuple((*cell, name) for cell in CELLS if cell != ("deepspeed", "full_shard") for name in NAMES))
def test_a_forward_that_reads_them_trains_as_plain_torch(backend, strategy, name):
    reading(name).judge(config(backend, strategy))


def said_of(backend, act):
    """The error that ends a run, with its notes."""
    try:
        with unishard.prepare(MODEL.built(), config(backend)) as engine:
            act(engine)
    except RuntimeError as error:
        return " ".join((str(error), *getattr(error, "__notes__", ())))
    except unishard.ModelError as error:
        return str(error)
    return "nothing"


@in_ranks(cells=EACH)
def test_what_a_backend_cannot_read_names_what_to_write(backend):
    def in_the_loss(engine):
        engine.backward(engine(**inputs(0, engine.rank)) + engine.module.layers[0].up.weight.square().sum())

    said = [
        said_of(backend, lambda engine: engine.module.layers[0].up.weight.tolist()),
        said_of(backend, lambda engine: parameters_to_vector(engine.module.parameters())),
    ]
    assert all("engine.weights.read(name)" in each for each in said) or (backend, said) == (
        "deepspeed",
        ["nothing"] * 2,
    )
    assert "engine.weights.unsharded" in said_of(backend, in_the_loss)
