"""What modules keep beside their tensors, by `get_extra_state`, is in a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from harness import OTHER, config, heard, in_ranks, of_all_ranks, own_share, train
from torch import nn

import unishard
from unishard.testing.models import mlp


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.largest = 0, torch.zeros(())

    def forward(self, x):
        self.calls += 1
        self.largest = torch.maximum(self.largest, x.detach().float().abs().max())
        return x

    def get_extra_state(self):
        return {"calls": self.calls, "largest": self.largest}

    def set_extra_state(self, state):
        self.calls, self.largest = state["calls"], state["largest"]


def counted():
    model = mlp()
    model.head = nn.Sequential(Counting(), model.head)
    return model


def uncounted():
    model = mlp()
    model.head = nn.Sequential(nn.Identity(), model.head)
    return model


def prepared(backend, model):
    return unishard.prepare(model, config(backend, "full_shard"))


@in_ranks(cells=(("fsdp",), ("deepspeed",)), in_turn=True)
def test_extra_state_is_saved_and_loaded_by_the_other_engine(backend, root):
    with prepared(backend, counted()) as engine:
        train(engine, own_share(2))
        engine.save(root, state={"extra_state": 1})
        saved = engine.module.head[0].get_extra_state()
    with prepared(OTHER[backend], counted()) as engine, heard() as lines:
        resumed = engine.load(root)
        loaded = engine.module.head[0].get_extra_state()
    assert loaded == of_all_ranks(saved)[0]
    assert loaded["calls"] == 2
    assert not resumed.notes
    assert resumed.state == {"extra_state": 1}
    assert not any("extra state" in line for line in lines)


@in_ranks(cells=(("fsdp",), ("deepspeed",)), in_turn=True)
def test_extra_state_without_its_module_is_noted(backend, root):
    notes = {}
    for saved, loaded in ((counted, uncounted), (uncounted, counted)):
        place = Path(root, saved.__name__)
        with prepared(backend, saved()) as engine:
            train(engine, own_share(1))
            engine.save(place)
        with prepared(backend, loaded()) as engine:
            notes[saved] = engine.load(place).notes
    assert notes == {
        counted: ("its extra state of head.0 is not loaded: the model has no such module",),
        uncounted: ("it lacks the extra state of head.0, which stays as it is",),
    }
