"""Parameters without dimensions, such as CLIP's `logit_scale`, and without elements are read and edited by name.

That they train, save and export as in plain torch is in the models that `make models` trains.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from harness import config, in_ranks, my_rank, of_all_ranks
from torch import nn
from torch.nn import functional

import unishard

CELLS = (("fsdp", "full_shard"), ("deepspeed", "full_shard"), ("deepspeed", "shard_grad_op"))


class Numbers(nn.Module):
    """Numbers of the root, in a list and frozen; empty weights beside them."""

    def __init__(self):
        super().__init__()
        self.layer, self.no_inputs = nn.Linear(6, 6), nn.Parameter(torch.empty(6, 0))
        self.scale, self.fixed = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.shifts = nn.ParameterList([nn.Parameter(torch.tensor(float(index))) for index in range(2)])
        self.nothing = nn.Parameter(torch.empty(0, 5))

    def forward(self, x):
        assert self.scale.shape == self.shifts[0].shape == ()
        x = self.layer(x) + functional.linear(x[:, :0], self.no_inputs)
        return x * self.scale.exp() * self.fixed + self.shifts[0] + self.shifts[1]


@in_ranks(cells=CELLS)
def test_each_rank_holds_what_was_planned(backend, strategy, monkeypatch):
    """Of frozen parameters and a caller's groups too."""
    planned, held, model = {}, {}, Numbers()
    model.more = nn.Linear(5, 3).requires_grad_(False)

    def look(adapter, placement, plan, layout):
        for name, parameter in adapter.module.named_parameters():
            with torch.no_grad():
                planned[name], held[name] = layout[name].of(my_rank()), adapter.master_shard(parameter).interval

    def groups(parameters):
        first, *others = parameters
        return torch.optim.SGD([{"params": others}, {"params": [first], "lr": 1.0}], lr=1e-3)

    monkeypatch.setattr(importlib.import_module("unishard.engine.prepare"), "verify", look)
    own = {"native": {"deepspeed": {"zero_optimization": {"parameter_alignment": True}}}}
    aligned = (backend, strategy) == ("deepspeed", "shard_grad_op")
    unishard.prepare(model, config(backend, strategy, optimizer=None, **own if aligned else {}), groups).close()
    everyones = of_all_ranks(held)
    assert held == planned
    for name, parameter in Numbers().named_parameters():
        assert sorted({element for each in everyones for element in each[name]}) == [*range(parameter.numel())]


@in_ranks(cells=CELLS)
def test_they_are_read_and_edited_by_name(backend, strategy):
    with unishard.prepare(Numbers(), config(backend, strategy)) as engine:
        engine.weights.write("scale", torch.tensor(0.25))
        read = [engine.weights.read("scale")]
        with engine.weights.gathered(["scale", "shifts.0", "nothing"]) as weights:
            shapes = [tuple(each.shape) for each in weights.values()]
            weights["scale"].fill_(0.5)
        engine.weights.set_trainable("no_inputs", False)
        engine.weights.set_trainable("no_inputs", True)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(my_rank()))
        engine.backward(engine(x).square().mean())
        engine.gradients.write("scale", torch.tensor(3.0))
        read += [
            engine.weights.read("scale"),
            engine.gradients.read("scale"),
            torch.tensor(engine.weights.norms()["scale"]),
        ]
        held = {name: engine.weights.read(name).shape for name, _ in engine.module.named_parameters()}
    assert [float(each) for each in read] == pytest.approx([0.25, 0.5, 3.0, 0.5])
    assert [tuple(each.shape) for each in read] == [()] * 4
    assert shapes == [(), (), (0, 5)]
    assert held == {name: parameter.shape for name, parameter in Numbers().named_parameters()}
