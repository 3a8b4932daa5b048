"""Models that plain torch trains, and an engine cannot; and what is done to a model after it was prepared."""

from __future__ import annotations

import torch
from harness import checked as config
from harness import own_share, prepare
from torch import nn
from torch.nn import functional

import unishard
from mistakes.mistake import mistake
from unishard.testing.models import MlpOutput, mlp


class Twice(nn.Module):
    """Two layers of one size."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(13, 13), nn.Linear(13, 13)


def transposed():
    model = Twice()
    model.decoder.weight = nn.Parameter(model.encoder.weight.t())
    return model


def same_data():
    model = Twice()
    model.decoder.weight.data = model.encoder.weight.data
    return model


def watched():
    model = Twice()
    model.register_buffer("first", model.encoder.weight.detach()[0])
    return model


TIES = {"transposed": transposed, "same data": same_data, "watched": watched}


@mistake("weights that are tied by their memory: `decoder.weight = nn.Parameter(encoder.weight.t())`", "transposed")
@mistake("`decoder.weight.data = encoder.weight.data`", "same data")
@mistake("a buffer that is a view of a weight", "watched")
def shared_memory(backend, tie):
    for strategy in ("full_shard", "shard_grad_op", "no_shard"):
        unishard.prepare(TIES[tie](), config(backend, strategy))


@mistake("`nn.Embedding(..., sparse=True)`")
def sparse_gradients(backend):
    unishard.prepare(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2)), config(backend))


@mistake("two models that share a module, each prepared", "module")
@mistake("two models that share a parameter, each prepared", "parameter")
def two_models(backend, what):
    one, other = Twice(), Twice()
    if what == "module":
        other.encoder = one.encoder
    else:
        other.encoder.weight = one.encoder.weight
    with unishard.prepare(one, config(backend, "no_shard")):
        unishard.prepare(other, config(backend, "full_shard"))


def replace_head(model):
    model.head = nn.Linear(*reversed(mlp().head.weight.shape))


def add_adapters(model):
    from peft import LoraConfig, get_peft_model

    get_peft_model(model, LoraConfig(target_modules=["head"]))


def add_parameter(model):
    model.scale = nn.Parameter(torch.ones(()))


ADDED = {"head": replace_head, "adapters": add_adapters, "parameter": add_parameter}


@mistake("a head that is replaced after `prepare`", "head")
@mistake("`get_peft_model(engine.module, ...)` after `prepare`", "adapters")
@mistake("a parameter that is added after `prepare`", "parameter")
def added_after_prepare(backend, what):
    with prepare(config(backend)) as engine:
        ADDED[what](engine.module)
        engine(**own_share(1)[0])


class Hooked(nn.Module):
    """Multiplies what an embedding returns by the mean of its weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 3)
        self.table.register_forward_hook(lambda module, args, output: output * module.weight.mean())

    def forward(self, x, labels):
        logits = self.head(self.table((x[:, 0].abs() * 10).long() % 8))
        return MlpOutput(functional.cross_entropy(logits.float(), labels % 3), logits)


@mistake("a hook that computes with the weight of an embedding, as `spectral_norm(nn.Embedding(...))` does")
def hooked_embedding(backend):
    batch = own_share(1)[0]
    plain = Hooked()
    plain(**batch).loss.backward()
    with unishard.prepare(Hooked(), config(backend)) as engine:
        engine.module.table.register_forward_pre_hook(
            lambda module, args: setattr(engine, "norm", module.weight.norm())
        )
        loss = engine(**batch).loss
        engine.backward(loss)
        got = engine.gradients.read("table.weight").norm().item()
    gradient = plain.table.weight.grad
    torch.distributed.all_reduce(gradient)
    return [got], [(gradient / 2).norm().item()]
