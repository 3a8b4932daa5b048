"""Models and loops off the beaten path: a part that runs alone, two engines at once, a layer with other weights."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from harness import assert_conforms, curve, error, own_share, play, prepare, tolerance, train, values, windows
from harness.training import ACCUMULATION, DEEP, MICRO_BATCHES, SPANNING, UPDATES, config, configured, everyones
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils.parametrize import register_parametrization

import unishard
from unishard.testing import oracle
from unishard.testing.models import MlpOutput, mlp

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16}
CELLS = SPANNING
everywhere = pytest.mark.parametrize("cell", CELLS, ids="-".join)


def played(scenario, cell, cells=CELLS):
    """What both ranks returned."""
    return values(play(tuple((scenario, cell) for cell in cells))[scenario, cell])


# -- a part of the model alone


def part(backend, strategy, precision):
    with prepare(configured(backend, strategy, precision)) as engine, torch.no_grad():
        return engine.module.blocks[1](torch.linspace(-1, 1, 46, dtype=COMPUTE[precision]).view(2, 23)).float()


@everywhere
def test_a_block_runs_before_the_model_does(cell):
    with torch.no_grad():
        wanted = mlp().blocks[1](torch.linspace(-1, 1, 46).view(2, 23))
    for found in played(part, cell):
        assert torch.allclose(found, wanted, atol=1e-6 if cell[2] == "fp32" else 3e-2)


# -- two engines in one process


@cache
def plain(precision, seed=7, updates=UPDATES):
    return oracle.train(mlp(seed), windows(updates=updates), configured("fsdp", "full_shard", precision), world=2)


PAIRS = {
    "fsdp": (("fsdp", "full_shard", "fp32"), ("fsdp", "no_shard", "fp32")),
    "fsdp in bf16": (("fsdp", "shard_grad_op", "bf16"), ("fsdp", "full_shard", "bf16")),
    "deepspeed": (("deepspeed", "full_shard", "fp32"), ("deepspeed", "full_shard", "fp32")),
    "deepspeed, two stages": (("deepspeed", "shard_grad_op", "bf16"), ("deepspeed", "full_shard", "fp32")),
    "fsdp and deepspeed": (("fsdp", "full_shard", "fp32"), ("deepspeed", "full_shard", "bf16")),
    "deepspeed and fsdp": (("deepspeed", "shard_optimizer", "bf16"), ("fsdp", "shard_optimizer", "fp32")),
}
ORDERS = ("in turns", "crossed")
COUPLES = tuple(
    (pair, order)
    for place, pair in enumerate(PAIRS)
    for number, order in enumerate(ORDERS)
    if DEEP or (place + number) % 2 == 0
)
SEEDS = (7, 8)
TOGETHER = 2
"""Updates of both, before the first is closed."""


def two_engines(pair, order):
    """Both train; then the first is closed, and the second goes on.

    `crossed`: both forwards, both backwards, both steps.
    """
    engines = [unishard.prepare(mlp(seed), configured(*cell)) for seed, cell in zip(SEEDS, PAIRS[pair], strict=True)]
    share, first_ones = own_share(MICRO_BATCHES), TOGETHER * ACCUMULATION
    done = ([], [])
    for batches in zip(*(engine.batches(share[:first_ones]) for engine in engines), strict=True):
        losses = []
        for engine, batch in zip(engines, batches, strict=True):
            losses.append(engine(**batch).loss)
            if order == "in turns":
                engine.backward(losses[-1])
        if order == "crossed":
            for engine, loss in zip(engines, losses, strict=True):
                engine.backward(loss)
        for engine, loss, log in zip(engines, losses, done, strict=True):
            log.append((engine.mean(loss), engine.step()))
    first, second = engines
    first.close()
    done[1].extend(train(second, share[first_ones:]))
    second.close()
    return [curve(log) for log in done]


@pytest.mark.parametrize("couple", COUPLES, ids="-".join)
def test_two_engines_train_side_by_side_and_one_outlives_the_other(couple):
    for curves in played(two_engines, couple, COUPLES):
        for cell, seed, updates, trained in zip(PAIRS[couple[0]], SEEDS, (TOGETHER, UPDATES), curves, strict=True):
            assert_conforms(trained, plain(cell[2], seed, updates), tolerance(*cell))


# -- a layer that is called with other tensors in place of its weights -----------------------------


class Tenth(nn.Module):
    def forward(self, weight):
        return 0.9 * weight


class Replaced(nn.Module):
    """Computes a layer with nine tenths of its weight: by a call with other tensors, or by a parametrization."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(5)
        self.way, self.block, self.head = way, nn.Linear(13, 12), nn.Linear(12, 11)
        if way == "parametrization":
            register_parametrization(self.block, "weight", Tenth())

    def forward(self, x, labels):
        if self.way == "call":
            hidden = functional_call(self.block, {"weight": 0.9 * self.block.weight, "bias": self.block.bias}, (x,))
        else:
            hidden = self.block(x)
        logits = self.head(torch.tanh(hidden))
        return MlpOutput(functional.cross_entropy(logits, labels), logits)


def replaced(backend, strategy, way, train_):
    with unishard.prepare(Replaced(way), config(backend, strategy), train=train_) as engine:
        return curve(train(engine, own_share(2))) if train_ else engine(**own_share(1)[0]).loss


REPLACED = (
    ("deepspeed", "full_shard", "call"),
    ("deepspeed", "full_shard", "parametrization"),
    ("deepspeed", "shard_grad_op", "call"),
)
REFUSED = tuple((replaced, (*REPLACED[0], train_)) for train_ in (True, False))


def test_a_layer_with_other_tensors_for_its_weights_trains_or_is_named_with_what_does():
    played = play((*REFUSED, *((replaced, (*cell, True)) for cell in REPLACED[1:])))
    for refused in REFUSED:
        said = error(played[refused])
        assert said.startswith(
            "ModelError: the forward of block was called with other tensors in place of its parameters"
        )
        assert said.endswith("register_parametrization, or set sharding to shard_grad_op")
    windows = [everyones(turn, turn + 1, world=2) for turn in range(2)]
    wanted = oracle.train(Replaced("call"), windows, config("fsdp"), world=2)
    for cell in REPLACED[1:]:
        for found in values(played[replaced, (*cell, True)]):
            assert found.losses == pytest.approx(wanted.losses, rel=1e-6)
            assert found.norms == pytest.approx(wanted.norms, rel=1e-5)
