"""Models and loops off the beaten path: a part that runs alone, two engines at once, a layer with other weights."""

from __future__ import annotations

import torch
from harness import Scenario, assert_conforms, curve, in_ranks, own_share, prepare, refused, tolerance, train
from harness.training import ACCUMULATION, DEEP, MICRO_BATCHES, SPANNING, UPDATES, config, configured
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils.parametrize import register_parametrization

import unishard
from unishard.testing.models import MlpOutput, mlp

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16}


# -- a part of the model alone


@in_ranks(cells=SPANNING)
def test_a_block_runs_before_the_model_does(backend, strategy, precision):
    x = torch.linspace(-1, 1, 46).view(2, 23)
    with prepare(configured(backend, strategy, precision)) as engine, torch.no_grad():
        found = engine.module.blocks[1](x.to(COMPUTE[precision])).float()
        assert torch.allclose(found, mlp().blocks[1](x), atol=1e-6 if precision == "fp32" else 3e-2)


# -- two engines in one process


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


@in_ranks(cells=COUPLES)
def test_two_engines_train_side_by_side_and_one_outlives_the_other(pair, order):
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
    for cell, seed, updates, log in zip(PAIRS[pair], SEEDS, (TOGETHER, UPDATES), done, strict=True):
        wanted = Scenario(mlp, (seed,), micro_batches=updates * ACCUMULATION).plain(configured(*cell))
        assert_conforms(curve(log), wanted, tolerance(*cell))


# -- a layer that is called with other tensors in place of its weights -----------------------------


class Tenth(nn.Module):
    def forward(self, weight):
        return 0.9 * weight


class Replaced(nn.Module):
    """Computes a layer with nine tenths of its weight: by a call with other tensors, or by a parametrization."""

    def __init__(self, way):
        super().__init__()
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


@in_ranks(cells=(("full_shard", "parametrization"), ("shard_grad_op", "call")))
def test_a_layer_with_other_tensors_for_its_weights_trains(strategy, way):
    Scenario(Replaced, (way,)).judge(config("deepspeed", strategy))


@in_ranks(cells=((True,), (False,)))
def test_a_layer_with_other_tensors_for_its_weights_is_named_with_what_trains(trains):
    with unishard.prepare(Replaced("call"), config("deepspeed", "full_shard"), train=trains) as engine:
        said = refused(engine, **own_share(1)[0])
    assert said.startswith("ModelError: the forward of block was called with other tensors in place of its parameters")
    assert said.endswith("register_parametrization, or set sharding to shard_grad_op")
