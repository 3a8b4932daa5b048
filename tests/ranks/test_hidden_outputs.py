"""Tensors that leave a module otherwise than in a tensor, list, tuple, dict or dataclass that it returns: in an object,
in an attribute, or as a weight of the module."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from harness import (
    assert_conforms,
    curve,
    in_ranks,
    my_rank,
    own_share,
    play,
    refused,
    tolerance,
    train,
    values,
    windows,
)
from harness.training import MICRO_BATCHES, SPANNING, UPDATES, config, configured
from mistakes.forwards import WIDTH, Block
from torch import nn
from torch.nn import functional

import unishard
from unishard.testing import oracle

IN, CLASSES = 13, 11


class WithAttribute(Block):
    def forward(self, x):
        y = super().forward(x)
        self.aux = {"weight": self.up.weight.square().mean(), "hidden": torch.relu(self.up(x)).square().mean()}
        return y


class Prompt(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, rows=None):
        return self.weight if rows is None else self.weight.expand(rows, -1)


class Answer:
    """No dataclass."""

    def __init__(self, loss):
        self.loss = loss


class Model(nn.Module):
    """Two blocks between an input and a head, or a stem with a weight in place of them."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(5)
        self.kind = kind
        self.stem, self.head = nn.Linear(IN, WIDTH), nn.Linear(WIDTH, CLASSES)
        made = {"attribute": WithAttribute, "no units": nn.Identity}.get(kind, Prompt)
        self.layers = nn.ModuleList(made() for _ in range(2))

    def forward(self, x, labels):
        x, aux = self.stem(x), 0.0
        for layer in self.layers:
            if self.kind == "weight":
                x = x * layer()
            elif self.kind == "view":
                x = x * layer(len(x))
            else:
                x = layer(x)
        if self.kind == "attribute":
            aux = sum(value for layer in self.layers for value in layer.aux.values())
        return Answer(functional.cross_entropy(self.head(x).float(), labels) + aux)


KINDS = ("attribute", "no units", "weight", "view")
CELLS = tuple((kind, *cell) for kind in KINDS for cell in (*SPANNING, ("fsdp", "full_shard", "fp32")))


def sharding(kind, strategy):
    units = {"attribute": ["WithAttribute"], "no units": "auto"}
    return strategy if strategy == "no_shard" else {"strategy": strategy, "units": units.get(kind, ["Prompt"])}


def trained(kind, backend, strategy, precision):
    with unishard.prepare(Model(kind), configured(backend, sharding(kind, strategy), precision)) as engine:
        return curve(train(engine, own_share(MICRO_BATCHES)))


@cache
def wanted(kind, precision):
    return oracle.train(Model(kind), windows(updates=UPDATES), configured("fsdp", "full_shard", precision), world=2)


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_they_are_trained(cell):
    kind, *engine = cell
    for found in values(play(tuple((trained, each) for each in CELLS))[trained, cell]):
        assert_conforms(found, wanted(kind, engine[-1]), tolerance(*engine))


def evaluated(backend, train_):
    """A unit's own weight, in a forward without a graph."""
    cfg = config(backend, sharding("view", "full_shard"))
    with unishard.prepare(Model("view"), cfg, train=train_) as engine:
        engine.eval()
        return engine(**own_share(1)[0]).loss.item(), my_rank()


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
@pytest.mark.parametrize("train_", [True, False])
def test_a_returned_weight_is_there_in_evaluation(backend, train_):
    cells = tuple((evaluated, (each, way)) for each in ("fsdp", "deepspeed") for way in (True, False))
    for loss, rank in values(play(cells)[evaluated, (backend, train_)]):
        with torch.no_grad():
            batch = windows()[0][rank]
            assert loss == pytest.approx(Model("view")(**batch).loss.item(), rel=1e-6)


class Judge(nn.Sequential):
    """Keeps the features that a generator is to match."""

    def forward(self, x):
        self.features = self[0](x)
        return self[1](torch.tanh(self.features))


def judge():
    torch.manual_seed(5)
    return Judge(nn.Linear(IN, WIDTH), nn.Linear(WIDTH, 1))


@in_ranks(cells=(("deepspeed", "full_shard"),))
def test_a_loss_on_kept_features_needs_the_output_too(backend, strategy):
    x, wanted = (torch.ones(2, IN, requires_grad=True) for _ in range(2))
    with unishard.prepare(judge(), config(backend, strategy)) as engine:
        engine(x)
        message = refused(lambda: engine.backward(engine.module.features.square().mean()))
    assert "ModelError: the loss uses what a model computes inside its forward" in message
    assert "add the output to the loss, as in loss + 0.0 * output.sum()" in message
    x.grad = None
    with unishard.prepare(judge(), config(backend, strategy)) as engine:
        output = engine(x)
        engine.backward(engine.module.features.square().mean() + 0.0 * output.sum())
        norm = engine.step().grad_norm
    plain = judge()
    plain(wanted)
    plain.features.square().mean().backward()
    gradients = [each.grad for each in plain.parameters() if each.grad is not None]
    assert norm == pytest.approx(float(nn.utils.get_total_norm(gradients)), rel=1e-5)
    torch.testing.assert_close(x.grad, wanted.grad)
