"""Modules that some ranks leave out, beyond what the conformance suite measures: what is gathered, said and refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from harness import BACKENDS, PAIRS, config, error, my_rank, play, values
from torch import nn
from torch.nn import functional

import unishard
from unishard.config import Sharding
from unishard.engine.model.units import find_units
from unishard.testing.features.conditional import Mixture, Pictures

MODELS = {"Mixture": Mixture, "Pictures": Pictures}


def batch(picture):
    generator = torch.Generator().manual_seed(40 + my_rank())
    return {
        "x": torch.randn(2, 13, generator=generator),
        "labels": torch.tensor([1, 3]),
        "picture": torch.tensor([int(picture), 0]),
    }


def built(kind):
    torch.manual_seed(7)
    return MODELS[kind]()


def prepared(backend, strategy, kind, whole, **sharding):
    return unishard.prepare(
        built(kind), config(backend, {"strategy": strategy, "conditional_modules": [whole], **sharding})
    )


def units(backend, kind, whole, **sharding):
    with prepared(backend, "full_shard", kind, whole, **sharding) as engine:
        return engine.weights.placement().units


def held(backend, strategy):
    """Bytes of parameters on this rank between steps, as a part of all, before and after a step that only rank 1 needs
    the tower for."""
    with prepared(backend, strategy, "Pictures", "Tower") as engine:
        whole = sum(parameter.numel() * 4 for parameter in built("Pictures").parameters())
        before = engine.weights.placement().param_bytes / whole
        engine.backward(engine(**batch(picture=my_rank() == 1)).loss)
        engine.step()
        return before, engine.weights.placement().param_bytes / whole


def told(backend, strategy):
    """Warnings of a step in which one rank leaves the tower out, and whether both ranks then have the same tower."""
    with prepared(backend, strategy, "Pictures", "Tower") as engine:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.backward(engine(**batch(picture=my_rank() == 1)).loss)
            engine.step()
        with torch.no_grad():
            output = engine(**batch(picture=True) | {"x": torch.ones(2, 13)}).logits
        return [str(warning.message) for warning in caught if warning.category is UserWarning], output.tolist()


def interrupted(backend):
    """An evaluation that only one rank needs the tower for, between backward and step and between forward and
    backward."""
    losses = []
    for evaluates in (False, True):
        with prepared(backend, "full_shard", "Pictures", "Tower") as engine:
            for _ in range(3):
                loss = engine(**batch(picture=my_rank() == 0)).loss
                engine.backward(loss)
                if evaluates:
                    with torch.no_grad():
                        engine(**batch(picture=my_rank() == 1))
                engine.step()
                losses.append(engine.mean(loss))
    return losses


def infinite(backend, strategy):
    """A tower with an infinite weight that nobody uses spoils nothing."""
    model = built("Pictures")
    with torch.no_grad():
        model.tower.layers[0].up.weight[0, 0] = float("inf")
    with unishard.prepare(model, config(backend, {"strategy": strategy, "conditional_modules": ["Tower"]})) as engine:
        engine.backward(engine(**batch(picture=False)).loss)
        return engine.step().updated


def checkpointed(backend):
    """Experts behind a router, recomputed in blocks."""
    norms = []
    for asked in ("none", "full"):
        cfg = config(
            backend, {"strategy": "full_shard", "conditional_modules": ["Expert"]}, activation_checkpointing=asked
        )
        with unishard.prepare(built("Mixture"), cfg) as engine:
            for _ in range(3):
                engine.backward(engine(**batch(picture=False)).loss)
                norms.append(engine.step().grad_norm)
    return norms


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

    def forward(self, ids, image):
        x = self.embedding(ids)
        if image is not None:
            x = torch.cat([self.dropout(self.tower(image)), x[:, 2:]], 1)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


def seeing():
    torch.manual_seed(3)
    return Seeing()


def seen(update, rank):
    """A batch; only one of the ranks has an image."""
    generator = torch.Generator().manual_seed(10 * update + rank)
    ids, image = torch.randint(0, 16, (2, 6), generator=generator), torch.randn(2, 2, 4, generator=generator)
    return ids, image if (update + rank) % 2 else None


def before_frozen(backend, strategy):
    """Losses and norms of updates in which each rank leaves the tower out in turn."""
    sharding = {"strategy": strategy, "conditional_modules": ["Tower"]}
    found = []
    with unishard.prepare(seeing(), config(backend, sharding)) as engine:
        for update in range(3):
            loss = engine(*seen(update, my_rank()))
            engine.backward(loss)
            found.append((engine.mean(loss), engine.step().grad_norm))
    return found


CELLS = PAIRS
SCENARIOS = (
    *((function, cell) for function in (told, infinite) for cell in CELLS),
    *((function, (backend,)) for function in (interrupted, checkpointed) for backend in BACKENDS),
    *((before_frozen, (backend, strategy)) for backend in BACKENDS for strategy in ("shard_grad_op", "full_shard")),
    *((held, (backend, "full_shard")) for backend in BACKENDS),
    *(
        (units, (backend, *case))
        for backend in BACKENDS
        for case in (("Mixture", "Expert"), ("Pictures", "Tower"), ("Mixture", "Routed"))
    ),
)


def played(function, *arguments):
    return values(play(SCENARIOS)[function, arguments])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_whole_unit_is_no_unit_nor_is_anything_in_it(backend):
    assert played(units, backend, "Mixture", "Expert")[0] == ("inp", "blocks.0", "blocks.1", "head")
    assert played(units, backend, "Pictures", "Tower")[0] == ("blocks.0", "blocks.1")
    assert played(units, backend, "Mixture", "Routed")[0] == ("inp", "head")


@pytest.mark.parametrize("backend", BACKENDS)
def test_between_steps_a_tower_is_sharded_like_everything_else(backend):
    for before, after in played(held, backend, "full_shard"):
        assert before == after < 0.6


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_the_rank_that_leaves_it_out_updates_it_too_and_nobody_is_warned(cell):
    (warned, output), (also_warned, same) = played(told, *cell)
    assert warned == also_warned == []
    assert output == same


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_evaluation_may_stand_between_backward_and_step(backend):
    for losses in played(interrupted, backend):
        assert losses[:3] == losses[3:]


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_the_gradient_of_what_nobody_used_is_zero_whatever_its_value(cell):
    assert played(infinite, *cell) == [True, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_may_be_recomputed(backend):
    for norms in played(checkpointed, backend):
        assert norms[:3] == norms[3:]


@pytest.mark.parametrize("strategy", ["shard_grad_op", "full_shard"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_may_leave_out_a_tower_before_frozen_layers(backend, strategy):
    model = seeing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for update in range(3):
        losses = [model(*seen(update, rank)) for rank in range(2)]
        (sum(losses) / 2).backward()
        trained = [each.grad for each in model.parameters() if each.grad is not None]
        expected.append((sum(losses).item() / 2, torch.nn.utils.get_total_norm(trained).item()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    for found in played(before_frozen, backend, strategy):
        for (loss, norm), (wanted, wanted_norm) in zip(found, expected, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-6)
            assert norm == pytest.approx(wanted_norm, rel=1e-5)


# -- what is refused -------------------------------------------------------------------------------


def refused(strategy):
    prepared("fsdp", strategy, "Pictures", "VisionTower").close()


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_a_class_that_is_not_there_is_refused(strategy):
    raised = error(play(((refused, ("no_shard",)), (refused, ("full_shard",))))[refused, (strategy,)])
    assert raised.startswith(
        "ModelError: sharding.conditional_modules: no module of class VisionTower in Pictures; did you mean Tower? Its"
    )


def test_a_class_is_no_unit_and_a_whole_unit():
    with pytest.raises(ValueError, match="conditional_modules: Expert is also in units"):
        config("fsdp", {"strategy": "full_shard", "units": ["Expert"], "conditional_modules": ["Expert"]})


def test_nothing_inside_a_whole_unit_may_be_named_as_a_unit():
    with pytest.raises(unishard.ModelError, match="every Expert lies inside another unit; remove it"):
        find_units(Mixture(), Sharding(units=["Expert"], conditional_modules=["Routed"]))
