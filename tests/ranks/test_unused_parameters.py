"""Parameters that an update does not use stay as they are, as in plain torch."""

from __future__ import annotations

from itertools import product

import torch
from harness import BACKENDS, STRATEGIES, Scenario, config, in_ranks, refused
from torch import nn
from torch.nn import functional

import unishard
from unishard.testing.models import MlpOutput


class Branching(nn.Module):
    """Runs its second branch only when told to."""

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(12, 5)
        self.sometimes = nn.Linear(12, 5)

    def forward(self, x, labels, both):
        logits = self.always(x) + (self.sometimes(x) if both else 0.0)
        return MlpOutput(functional.cross_entropy(logits.float(), labels), logits)


def micro_batch(number, rank):
    """Of which only rank 0's needs the second branch."""
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * number + rank))
    return {"x": x, "labels": torch.arange(4), "both": torch.tensor(rank == 0)}


BRANCHING = Scenario(Branching, data=micro_batch, loss=lambda model, batch: model(**batch).loss)
ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1}


def prepared(backend, strategy, **sections):
    return unishard.prepare(BRANCHING.built(), config(backend, strategy, optimizer=ADAMW, **sections))


def update(engine, number, both):
    engine.backward(engine(**micro_batch(number, engine.rank) | {"both": both}).loss)
    return engine.step()


def moved(engine):
    """How far the second branch's output moves in an update that does not use it, after one that did."""

    def branch():
        with torch.no_grad():
            batch = micro_batch(0, engine.rank)
            return engine(**batch | {"both": True}).logits - engine(**batch | {"both": False}).logits

    update(engine, 0, both=True)
    before = branch()
    update(engine, 1, both=False)
    return engine.mean((branch() - before).abs().max())


@in_ranks(cells=tuple(product(BACKENDS, STRATEGIES)))
def test_an_update_leaves_a_parameter_as_it_is_that_it_does_not_use(backend, strategy):
    looks = {"find_unused_parameters": True} if (backend, strategy) == ("fsdp", "no_shard") else {}
    with prepared(backend, strategy, native={"fsdp": looks}) as engine:
        assert moved(engine) < 1e-6


@in_ranks
def test_ddp_refuses_a_parameter_without_gradient_unless_it_may_look_for_it():
    with prepared("fsdp", "no_shard") as engine:
        said = refused(moved, engine)
    assert said.startswith("ModelError: ")
    assert "set native.fsdp.find_unused_parameters to true" in said


@in_ranks
def test_what_only_one_rank_uses_is_trained_with_the_mean_of_all_ranks():
    BRANCHING.judge(config("deepspeed", "no_shard", optimizer=ADAMW))


@in_ranks(cells=(*((strategy, "with others") for strategy in STRATEGIES[1:]), ("shard_grad_op", "alone")))
def test_state_that_begins_in_a_later_update_is_found_by_deepspeeds_own_functions(strategy, group):
    """Also where the first update uses nothing of a group of the optimizer: its first one, since DeepSpeed 0.19.8 finds
    no state of others."""
    from deepspeed.utils import safe_get_full_optimizer_state

    alone = {"groups": [{"params": ["always"], "lr": 0.02}]} if group == "alone" else {}
    with unishard.prepare(BRANCHING.built(), config("deepspeed", strategy, optimizer=ADAMW | alone)) as engine:
        update(engine, 0, both=False)
        update(engine, 1, both=True)
        state = safe_get_full_optimizer_state(engine.module.sometimes.weight, "exp_avg")
    assert state is not None
    assert bool(state.abs().sum() > 0)
