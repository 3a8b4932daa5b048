"""Tensors that leave a module otherwise than in a tensor, list, tuple, dict or dataclass that it returns: in an object,
in an attribute, or as a weight of the module."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from harness import BACKENDS, Scenario, in_ranks, own_share, refused
from harness.training import SPANNING, config, configured
from mistakes.forwards import WIDTH, Block
from torch import nn
from torch.nn import functional

import unishard

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


@in_ranks(cells=CELLS)
def test_they_are_trained(kind, backend, strategy, precision):
    Scenario(Model, (kind,)).judge(configured(backend, sharding(kind, strategy), precision))


@in_ranks(cells=tuple(product(BACKENDS, (True, False))))
def test_a_returned_weight_is_there_in_evaluation(backend, train):
    """A unit's own weight, in a forward without a graph."""
    view, batch = Scenario(Model, ("view",)), own_share(1)[0]
    with unishard.prepare(view.built(), config(backend, sharding("view", "full_shard")), train=train) as engine:
        engine.eval()
        loss = engine(**batch).loss.item()
    assert loss == pytest.approx(view.built()(**batch).loss.item(), rel=1e-6)


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
