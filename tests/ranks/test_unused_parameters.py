"""Parameters that an update does not use: a known difference between the engines, of which a user is told."""

from __future__ import annotations

import warnings

import pytest
import torch
from playing import STRATEGIES, config, error, my_rank, play, values
from torch import nn
from torch.nn import functional

import unishard
from unishard.testing.models import Output


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
        return Output(functional.cross_entropy(logits.float(), labels), logits)


def unused(backend, strategy, native):
    """How far the second branch's output moves in an update that does not use it, after one that did."""
    torch.manual_seed(11)
    adamw = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1}
    with unishard.prepare(Branching(), config(backend, strategy, optimizer=adamw, native={"fsdp": NATIVE[native]})) as engine:
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


NATIVE = {"none": {}, "find": {"find_unused_parameters": True}}
UNUSED = (
    *(("deepspeed", strategy, "none") for strategy in STRATEGIES),
    *(("fsdp", strategy, "none") for strategy in STRATEGIES),
    ("fsdp", "no_shard", "find"),
)


def moved(*cell):
    return play(tuple((unused, cell) for cell in UNUSED))[unused, cell]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_deepspeed_counts_a_missing_gradient_as_zero_so_moments_and_decay_act(strategy):
    assert min(values(moved("deepspeed", strategy, "none"))) > 1e-3


@pytest.mark.parametrize("cell", [cell for cell in UNUSED if cell[0] == "fsdp" and cell[1:] != ("no_shard", "none")], ids="-".join)
def test_torchs_engines_leave_a_parameter_without_gradient_as_it_is(cell):
    assert max(values(moved(*cell))) < 1e-6


def test_ddp_refuses_a_parameter_without_gradient_unless_it_may_look_for_it():
    raised = error(moved("fsdp", "no_shard", "none"))
    assert raised.startswith("ModelError: ")
    assert "set native.fsdp.find_unused_parameters to true" in raised


# -- what a user is told ----------------------------------------------------------------------------------------------------------


def told(backend, strategy, both):
    """Warnings of two updates."""
    with unishard.prepare(Branching(), config(backend, strategy, training={"gradient_accumulation_steps": 2})) as engine:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in engine.batches([*micro_batches(), *micro_batches()]):
                engine.backward(engine(**batch, both=both).loss)
                engine.step()
        return [str(warning.message) for warning in caught if warning.category is UserWarning]


CELLS = [(backend, strategy) for backend in ("fsdp", "deepspeed") for strategy in STRATEGIES if (backend, strategy) != ("fsdp", "no_shard")]
TOLD = tuple((told, (*cell, both)) for cell in CELLS for both in (True, False))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_deepspeed_tells_once_of_parameters_without_gradient(strategy):
    for (message,) in values(play(TOLD)[told, ("deepspeed", strategy, False)]):
        assert message.startswith("2 trainable parameters got no gradient in the first update (sometimes.weight, sometimes.bias); ")
        assert "freeze them with requires_grad_(False)" in message


@pytest.mark.parametrize("cell", [cell for _, cell in TOLD if cell[0] == "fsdp" or cell[2]], ids=str)
def test_nothing_is_said_where_nothing_differs(cell):
    assert values(play(TOLD)[told, cell]) == [[], []]
