"""Parameters that an update does not use stay as they are, as in plain torch."""

from __future__ import annotations

import pytest
import torch
from harness import STRATEGIES, config, error, my_rank, play, values
from torch import nn
from torch.nn import functional

import unishard
from unishard.testing.models import MlpOutput


def micro_batches():
    """Two of this rank's own."""
    generator = torch.Generator().manual_seed(300 + my_rank())
    return [{"x": torch.randn(4, 12, generator=generator), "labels": torch.arange(4)} for _ in range(2)]


class Branching(nn.Module):
    """Runs its second branch only when told to."""

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(12, 5)
        self.sometimes = nn.Linear(12, 5)

    def forward(self, x, labels, both):
        logits = self.always(x) + (self.sometimes(x) if both else 0.0)
        return MlpOutput(functional.cross_entropy(logits.float(), labels), logits)


def unused(backend, strategy, native):
    """How far the second branch's output moves in an update that does not use it, after one that did."""
    torch.manual_seed(11)
    with unishard.prepare(
        Branching(), config(backend, strategy, optimizer=ADAMW, native={"fsdp": NATIVE[native]})
    ) as engine:
        first, second = micro_batches()

        def branch():
            with torch.no_grad():
                return engine(**first, both=True).logits - engine(**first, both=False).logits

        engine.backward(engine(**first, both=True).loss)
        engine.step()
        before = branch()
        engine.backward(engine(**second, both=False).loss)
        engine.step()
        return engine.mean((branch() - before).abs().max())


ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1}
NATIVE = {"none": {}, "find": {"find_unused_parameters": True}}
UNUSED = (
    *(("deepspeed", strategy, "none") for strategy in STRATEGIES),
    *(("fsdp", strategy, "none") for strategy in STRATEGIES),
    ("fsdp", "no_shard", "find"),
)


def moved(*cell):
    return play(tuple((unused, cell) for cell in UNUSED))[unused, cell]


@pytest.mark.parametrize("cell", [cell for cell in UNUSED if cell != ("fsdp", "no_shard", "none")], ids="-".join)
def test_an_update_leaves_a_parameter_as_it_is_that_it_does_not_use(cell):
    assert max(values(moved(*cell))) < 1e-6


def test_ddp_refuses_a_parameter_without_gradient_unless_it_may_look_for_it():
    raised = error(moved("fsdp", "no_shard", "none"))
    assert raised.startswith("ModelError: ")
    assert "set native.fsdp.find_unused_parameters to true" in raised


# -- what only one rank uses -----------------------------------------------------------------------


def used_by_one():
    """Losses of updates in which only rank 0 runs the second branch, on an engine that allows it."""
    torch.manual_seed(11)
    with unishard.prepare(Branching(), config("deepspeed", "no_shard", optimizer=ADAMW)) as engine:
        losses = []
        for batch in micro_batches() * 3:
            loss = engine(**batch, both=my_rank() == 0).loss
            engine.backward(loss)
            engine.step()
            losses.append(engine.mean(loss))
        return losses


def expected_of_one():
    """The mean over both ranks' losses in plain torch."""
    torch.manual_seed(11)
    model, labels = Branching(), torch.arange(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    generators = [torch.Generator().manual_seed(300 + rank) for rank in range(2)]
    shares = [[torch.randn(4, 12, generator=generator) for _ in range(2)] * 3 for generator in generators]
    losses = []
    for first, second in zip(*shares, strict=True):
        loss = (model(first, labels, both=True).loss + model(second, labels, both=False).loss) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_what_only_one_rank_uses_is_trained_with_the_mean_of_all_ranks():
    first, second = values(play(((used_by_one, ()),))[used_by_one, ()])
    assert first == second
    assert first == pytest.approx(expected_of_one(), rel=1e-6)


def late(strategy):
    """Whether DeepSpeed's own functions find the optimizer's state of a parameter that the first update did not use."""
    from deepspeed.utils import safe_get_full_optimizer_state

    torch.manual_seed(11)
    with unishard.prepare(Branching(), config("deepspeed", strategy, optimizer=ADAMW)) as engine:
        for micro_batch, both in zip(micro_batches(), (False, True), strict=True):
            engine.backward(engine(**micro_batch, both=both).loss)
            engine.step()
        state = safe_get_full_optimizer_state(engine.module.sometimes.weight, "exp_avg")
        return state is not None and bool(state.abs().sum() > 0)


@pytest.mark.parametrize("strategy", ["shard_optimizer", "shard_grad_op", "full_shard"])
def test_state_that_begins_in_a_later_update_is_found_by_deepspeeds_own_functions(strategy):
    assert values(play(tuple((late, (each,)) for each in STRATEGIES[1:]))[late, (strategy,)]) == [True, True]
