"""What models and scripts do around modules: formats of inputs, marks on parameters, leaves of DeepSpeed."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
import torch
from harness import BACKENDS, SPANNING, config, curve, heard, play, train, values
from torch import nn
from torch.nn import functional

import unishard
from unishard.testing.models import MlpOutput, mlp

SIZE, TURNS, WORLD = 2, 3, 2
WORD, LENGTH = 53, 6


# -- data: each sample depends on its global index alone -------------------------------------------


def features(index):
    generator = torch.Generator().manual_seed(300 + index)
    return {"x": torch.randn(LENGTH, 12, generator=generator), "labels": torch.tensor(index % 5)}


def micro_batch(sample, turn, rank):
    samples = [sample((turn * WORLD + rank) * SIZE + index) for index in range(SIZE)]
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def own_batches(sample):
    rank = unishard.Topology.from_environment().rank
    return [micro_batch(sample, turn, rank) for turn in range(TURNS)]


# -- models ----------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A residual block."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(functional.gelu(self.up(x))))


# -- formats of inputs in bf16 ---------------------------------------------------------------------


@dataclass
class Positions:
    """What a block is given beside its input."""

    table: torch.Tensor
    scale: float


class Positioned(nn.Module):
    """Adds an fp32 table before its blocks, so that hidden states are in bf16 only if they are cast at each block,
    which gets it too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, 12 * LENGTH).reshape(LENGTH, 12))
        self.layers = nn.ModuleList(Attending() for _ in range(2))
        self.head = nn.Linear(12, 5)

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x + self.table, positions=Positions(self.table, 0.5), more={"tables": [self.table]})
        logits = self.head(x.mean(1))
        return MlpOutput(functional.cross_entropy(logits.float(), labels), logits)


class Attending(Layer):
    seen = ()

    def forward(self, x, positions, more):
        given = (x, positions.table, more["tables"][0])
        out = super().forward(x + (self.up.bias.mean() * positions.scale * positions.table).to(x.dtype))
        self.seen = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in (*given, out))
        return out


def positioned(backend, strategy):
    """Losses, and the formats that blocks and the caller see; then that nothing is cast once the engine is closed."""
    torch.manual_seed(11)
    engine = unishard.prepare(Positioned(), config(backend, strategy, precision="bf16"))
    done = curve(train(engine, own_batches(features)))
    output = engine(**own_batches(features)[0])
    seen = [layer.seen for layer in engine.module.layers], str(output.logits.dtype)
    engine.close()
    return done, seen, sum(len(module._forward_pre_hooks) for module in engine.module.modules())


POSITIONED = tuple((backend, strategy) for backend in BACKENDS for strategy in ("no_shard", "full_shard"))


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_blocks_get_their_hidden_states_in_bf16_and_tables_as_they_are_on_both_engines(strategy):
    played = play(tuple((positioned, cell) for cell in POSITIONED))
    (_, wanted, _), (done, seen, left) = (values(played[positioned, (backend, strategy)])[0] for backend in BACKENDS)
    assert seen == wanted == ([("bfloat16", "float32", "float32", "bfloat16")] * 2, "torch.bfloat16")
    assert left == 0
    assert done.losses[-1] < done.losses[0]


# -- what models and scripts do around modules -----------------------------------------------------


def marked(backend, strategy, precision):
    """Names of the parameters that the factory finds marked, and how many it gets."""
    model, found = mlp(), []
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.no_decay = name

    def build(params):
        params = list(params)
        found.extend(parameter.no_decay for parameter in params if hasattr(parameter, "no_decay"))
        found.append(len(params))
        return torch.optim.SGD(params, lr=0.1)

    with unishard.prepare(model, config(backend, strategy, precision=precision, optimizer=None), optimizer=build):
        return found


def listened(strategy):
    """What DeepSpeed has to say about a model without units."""
    with unishard.prepare(mlp(), config("deepspeed")):
        pass  # brings DeepSpeed's logger up
    model = nn.Sequential(nn.Linear(4, 4))
    with heard("DeepSpeed", logging.WARNING) as lines, unishard.prepare(model, config("deepspeed", strategy)):
        logging.getLogger("DeepSpeed").warning("something else")
    return lines


def flagged(strategy):
    """A model whose author has marked a leaf for ZeRO-3, as mixture-of-experts models ask for."""
    from deepspeed.utils import set_z3_leaf_modules

    model = mlp()
    set_z3_leaf_modules(model, [type(model.blocks[0])])
    with unishard.prepare(model, config("deepspeed", strategy)) as engine:
        return engine.weights.placement().units


AROUND = (
    *((flagged, (strategy,)) for strategy in ("no_shard", "shard_grad_op")),
    *((marked, cell) for cell in SPANNING),
    *((listened, (strategy,)) for strategy in ("no_shard", "full_shard")),
)


@pytest.mark.parametrize("strategy", ["no_shard", "shard_grad_op"])
def test_a_leaf_of_the_users_own_is_no_unit_where_deepspeed_does_not_look_at_it(strategy):
    assert values(play(AROUND)[flagged, (strategy,)]) == [(), ()]


@pytest.mark.parametrize("cell", [cell for name, cell in AROUND if name is marked], ids="-".join)
def test_what_is_set_on_a_parameter_reaches_the_optimizer_factory(cell):
    names = [name for name, _ in mlp().named_parameters()]
    for found in values(play(AROUND)[marked, cell]):
        assert found == [*(name for name in names if name.endswith("bias")), len(names)]


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_deepspeed_says_nothing_about_a_model_without_units_and_keeps_its_other_warnings(strategy):
    for lines in values(play(AROUND)[listened, (strategy,)]):
        assert lines == ["something else"]
