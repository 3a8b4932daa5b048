"""Modules that some ranks leave out, beyond what the conformance suite measures: what is gathered, said and refused."""

from __future__ import annotations

import warnings
from itertools import product

import pytest
import torch
from harness import BACKENDS, EACH, PAIRS, Scenario, config, in_ranks, my_rank, of_all_ranks, refused
from torch import nn
from torch.nn import functional

import unishard
from unishard.config import Sharding
from unishard.engine.model.units import find_units
from unishard.testing.features.conditional import Mixture, Pictures

MODELS = {"Mixture": Mixture, "Pictures": Pictures}


def batch(picture, rank=None):
    generator = torch.Generator().manual_seed(40 + (my_rank() if rank is None else rank))
    return {
        "x": torch.randn(2, 13, generator=generator),
        "labels": torch.tensor([1, 3]),
        "picture": torch.tensor([int(picture), 0]),
    }


def loss_of(model, micro_batch):
    return model(**micro_batch).loss


def built(kind):
    torch.manual_seed(7)
    return MODELS[kind]()


def prepared(backend, strategy, kind, whole, **sections):
    sharding = {"strategy": strategy, "conditional_modules": [whole]}
    return unishard.prepare(built(kind), config(backend, sharding, **sections))


@in_ranks(cells=EACH)
def test_a_whole_unit_is_no_unit_nor_is_anything_in_it(backend):
    for kind, whole, units in (
        ("Mixture", "Expert", ("inp", "blocks.0", "blocks.1", "head")),
        ("Pictures", "Tower", ("blocks.0", "blocks.1")),
        ("Mixture", "Routed", ("inp", "head")),
    ):
        with prepared(backend, "full_shard", kind, whole) as engine:
            assert engine.weights.placement().units == units


@in_ranks(cells=EACH)
def test_between_steps_a_tower_is_sharded_like_everything_else(backend):
    """Bytes of parameters on this rank, as a part of all, before and after a step that only rank 1 needs the tower
    for."""
    whole = sum(parameter.numel() * 4 for parameter in built("Pictures").parameters())
    with prepared(backend, "full_shard", "Pictures", "Tower") as engine:
        before = engine.weights.placement().param_bytes / whole
        engine.backward(engine(**batch(picture=my_rank() == 1)).loss)
        engine.step()
        assert before == engine.weights.placement().param_bytes / whole < 0.6


@in_ranks(cells=PAIRS)
def test_the_rank_that_leaves_it_out_updates_it_too_and_nobody_is_warned(backend, strategy):
    with prepared(backend, strategy, "Pictures", "Tower") as engine:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.backward(engine(**batch(picture=my_rank() == 1)).loss)
            engine.step()
        with torch.no_grad():
            output = engine(**batch(picture=True) | {"x": torch.ones(2, 13)}).logits
    assert torch.equal(*of_all_ranks(output))
    assert [str(warning.message) for warning in caught if warning.category is UserWarning] == []


def seen_by_rank_0(number, rank):
    return batch(picture=rank == 0, rank=rank)


@in_ranks(cells=EACH)
def test_an_evaluation_may_stand_between_backward_and_step(backend):
    """One that only the other rank needs the tower for."""

    @torch.no_grad()
    def evaluate(engine, number):
        engine(**batch(picture=engine.rank == 1))

    scenario = Scenario(Pictures, data=seen_by_rank_0, loss=loss_of, micro_batches=3, disturb=evaluate)
    scenario.judge(config(backend, {"strategy": "full_shard", "conditional_modules": ["Tower"]}))


@in_ranks(cells=PAIRS)
def test_the_gradient_of_what_nobody_used_is_zero_whatever_its_value(backend, strategy):
    model = built("Pictures")
    with torch.no_grad():
        model.tower.layers[0].up.weight[0, 0] = float("inf")
    with unishard.prepare(model, config(backend, {"strategy": strategy, "conditional_modules": ["Tower"]})) as engine:
        engine.backward(engine(**batch(picture=False)).loss)
        assert engine.step().updated


@in_ranks(cells=EACH)
def test_experts_behind_a_router_may_be_recomputed(backend):
    norms = []
    for asked in ("none", "full"):
        with prepared(backend, "full_shard", "Mixture", "Expert", activation_checkpointing=asked) as engine:
            for _ in range(3):
                engine.backward(engine(**batch(picture=False)).loss)
                norms.append(engine.step().grad_norm)
    assert norms[:3] == norms[3:]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Tower(nn.Sequential):
    pass


class Seeing(nn.Module):
    """A trained conditional tower before frozen layers, and a dropout that runs only with it."""

    def __init__(self):
        super().__init__()
        self.tower, self.dropout = Tower(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8)), nn.Dropout(0.0)
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.embedding.requires_grad_(False)
        self.layers[0].requires_grad_(False)

    def forward(self, ids, image=None):
        x = self.embedding(ids)
        if image is not None:
            x = torch.cat([self.dropout(self.tower(image)), x[:, 2:]], 1)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


def seen(number, rank):
    """A micro-batch; only one of the ranks has an image."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    ids, image = torch.randint(0, 16, (2, 6), generator=generator), torch.randn(2, 2, 4, generator=generator)
    return {"ids": ids} | ({"image": image} if (number + rank) % 2 else {})


SEEING = Scenario(Seeing, data=seen, loss=lambda model, batch: model(**batch), micro_batches=3)


@in_ranks(cells=tuple(product(BACKENDS, ("shard_grad_op", "full_shard"))))
def test_ranks_may_leave_out_a_tower_before_frozen_layers(backend, strategy):
    SEEING.judge(config(backend, {"strategy": strategy, "conditional_modules": ["Tower"]}))


# -- what is refused -------------------------------------------------------------------------------


@in_ranks(cells=(("no_shard",), ("full_shard",)))
def test_a_class_that_is_not_there_is_refused(strategy):
    said = refused(prepared, "fsdp", strategy, "Pictures", "VisionTower")
    assert said.startswith(
        "ModelError: sharding.conditional_modules: no module of class VisionTower in Pictures; did you mean Tower? Its"
    )


def test_a_class_is_no_unit_and_a_whole_unit():
    with pytest.raises(ValueError, match="conditional_modules: Expert is also in units"):
        config("fsdp", {"strategy": "full_shard", "units": ["Expert"], "conditional_modules": ["Expert"]})


def test_nothing_inside_a_whole_unit_may_be_named_as_a_unit():
    with pytest.raises(unishard.ModelError, match="every Expert lies inside another unit; remove it"):
        find_units(Mixture(), Sharding(units=["Expert"], conditional_modules=["Routed"]))
