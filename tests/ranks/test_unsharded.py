"""Weights that are read outside the forward of their modules: `engine.weights.unsharded` makes every engine train them as plain
torch does."""

from __future__ import annotations

import contextlib
import re
from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch
from harness import ACCUMULATION, BACKENDS, DEEP, EACH, Scenario, config, in_ranks
from torch import Tensor, nn
from torch.nn import functional

import unishard

WORDS = 17


class Output(NamedTuple):
    loss: Tensor
    hidden: Tensor


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.gelu(self.inner(self.norm(x)))


class Head(nn.Linear):
    pass


class Lm(nn.Module):
    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = Head(width, WORDS, bias=False)

    def forward(self, words: Tensor, fused: bool = False) -> Output:
        hidden = self.embed(words)
        for block in self.blocks:
            hidden = block(hidden)
        return Output(chunked(hidden, self.head.weight, words) if fused else hidden.sum() * 0, hidden)


def chunked(hidden: Tensor, weight: Tensor, words: Tensor) -> Tensor:
    """A cross entropy that never holds all logits, as fused losses do."""
    hidden, labels = hidden[:, :-1].flatten(0, 1), words[:, 1:].flatten()
    parts = zip(hidden.chunk(3), labels.chunk(3), strict=True)
    return sum(
        functional.cross_entropy((part.to(weight.dtype) @ weight.t()).float(), label, reduction="sum")
        for part, label in parts
    ) / len(labels)


def penalty(model: nn.Module) -> Tensor:
    return 1e-2 * sum(parameter.float().square().sum() for parameter in model.parameters())


def before(call, model, words):
    extra = penalty(model)  # its gradient comes after those of all modules
    return call(words, fused=True).loss + extra


LOSSES = {
    "inside": lambda call, model, words: call(words, fused=True).loss,
    "outside": lambda call, model, words: chunked(call(words).hidden, model.head.weight, words),
    "shared": lambda call, model, words: chunked(
        model.head(call(words).hidden) @ model.head.weight, model.embed.weight, words
    ),
    "penalty": lambda call, model, words: call(words, fused=True).loss + penalty(model),
    "penalty first": before,
}
ALL = [name for name, _ in Lm().named_parameters()]
NAMES = {
    "inside": ["head.weight"],
    "outside": ["head.weight"],
    "shared": ["embed.weight", "head.weight"],
    "penalty": ALL,
    "penalty first": ALL,
}


def words_of(number: int, rank: int) -> dict[str, Tensor]:
    return {"words": torch.randint(0, WORDS, (2, 7), generator=torch.Generator().manual_seed(10 * number + rank))}


def loss_of(model, batch, kind):
    return LOSSES[kind](model, getattr(model, "module", model), batch["words"])


@contextlib.contextmanager
def unsharded(engine, kind):
    shapes = {name: parameter.shape for name, parameter in Lm().named_parameters()}
    with engine.weights.unsharded(NAMES[kind]) as weights:
        assert {name: weight.shape for name, weight in weights.items()} == {name: shapes[name] for name in NAMES[kind]}
        yield


def trained(kind, **options):
    return Scenario(
        Lm, data=words_of, loss=partial(loss_of, kind=kind), around=partial(unsharded, kind=kind), **options
    )


TRAINED = {kind: trained(kind) for kind in LOSSES}
OF_FOUR = trained("penalty first", world=4)
EXTRAS = {
    "plain": {},
    "reshard": {"reshard_after_forward": 2},
    "groups": {"group_size": 2},
    "conditional": {"conditional_modules": ["Head"], "units": ["Block", "Embedding"]},
}


def configured(backend, strategy, precision="fp32", extra="plain"):
    units = {} if strategy == "no_shard" else {"units": ["Block", "Head", "Embedding"]}
    return config(
        backend,
        {"strategy": strategy} | units | EXTRAS[extra],
        precision=precision,
        training={"gradient_accumulation_steps": ACCUMULATION},
        optimizer={"name": "sgd", "lr": 0.02, "momentum": 0.9},
    )


CELLS = (
    *(
        (backend, "full_shard", "fp32", kind)
        for turn, backend in enumerate(BACKENDS)
        for number, kind in enumerate(LOSSES)
        if DEEP or (turn + number) % 2
    ),
    *((backend, "full_shard", "bf16", "penalty first") for backend in BACKENDS),
    *((backend, "full_shard", "bf16", "outside") for backend in BACKENDS if DEEP),
    ("fsdp", "no_shard", "bf16", "penalty first"),
    ("fsdp", "shard_optimizer", "bf16", "penalty first"),
    ("deepspeed", "shard_optimizer", "bf16", "outside"),
)
GROUPS = (
    ("fsdp", "full_shard", "fp32", "reshard"),
    ("deepspeed", "full_shard", "fp32", "reshard"),
    ("fsdp", "hybrid_shard", "bf16", "groups"),
)


@in_ranks(cells=CELLS)
def test_it_trains_as_plain_torch(backend, strategy, precision, kind):
    TRAINED[kind].judge(configured(backend, strategy, precision))


@in_ranks(cells=EACH)
def test_it_trains_as_plain_torch_beside_conditional_modules(backend):
    TRAINED["penalty first"].judge(configured(backend, "full_shard", "bf16", "conditional"))


@in_ranks(world=4, cells=GROUPS)
def test_it_trains_as_plain_torch_in_groups_of_ranks(backend, strategy, precision, extra):
    OF_FOUR.judge(configured(backend, strategy, precision, extra))


def besides(backend, strategy):
    """What a script does with the block besides training: numbers that no strategy and no engine changes."""
    with unishard.prepare(TRAINED["inside"].built(), configured(backend, strategy)) as engine:
        model, words = engine.module, words_of(0, engine.rank)["words"]
        found = []

        def update(loss):
            for _ in range(ACCUMULATION):
                with engine.weights.unsharded(ALL):
                    engine.backward(loss())
                step = engine.step()
            found.append(step.grad_norm)

        with contextlib.suppress(KeyError), engine.weights.unsharded(ALL):
            before(engine, model, words)
            raise KeyError
        engine.discard()
        with engine.weights.unsharded(ALL):
            before(engine, model, words)
            engine.discard()
            engine.backward(before(engine, model, words))
        engine.step()
        hidden = engine(words).hidden
        with engine.weights.unsharded(ALL):  # entered after the forward
            engine.backward(chunked(hidden, model.head.weight, words) + penalty(model))
        found.append(engine.step().grad_norm)
        update(lambda: (engine(words), penalty(model))[1])  # not through the forward
        engine.eval()
        with engine.weights.unsharded(["head.weight"]) as weights:
            found.append(float(engine(words, fused=True).loss.detach()))
            found.append(float(weights["head.weight"].detach().norm()))
        engine.train()
        with torch.no_grad(), engine.weights.unsharded(reversed(ALL)) as weights:
            found.append(sum(float(weight.norm()) for weight in weights.values()))
        assert not weights
        update(lambda: before(engine, model, words))
        return found


@in_ranks
def test_it_ends_and_begins_where_a_script_likes():
    places = [*product(BACKENDS, ("no_shard", "full_shard"))]
    first, *others = [besides(*place) for place in places]
    for place, found in zip(places[1:], others, strict=True):
        assert found == pytest.approx(first, rel=1e-5), place


@in_ranks(cells=EACH)
def test_weights_are_full_in_inference(backend):
    plain = TRAINED["inside"].built()
    model = unishard.prepare(TRAINED["inside"].built(), configured(backend, "full_shard"), train=False)
    with torch.no_grad(), model as engine, engine.weights.unsharded(["head.weight"]) as weights:
        words = words_of(0, engine.rank)["words"]
        found = [engine(words, fused=True).loss, chunked(engine(words).hidden, weights["head.weight"], words)]
    assert list(map(float, found)) == pytest.approx([float(plain(words, fused=True).loss.detach())] * 2, abs=1e-6)


@in_ranks(cells=tuple(product(BACKENDS, ("outside", "penalty"))), in_turn=True)
def test_an_error_without_it_names_it(backend, kind):
    block = re.escape("put the forward and the backward into a block `with engine.weights.unsharded([name, ...]):`")
    cfg = configured(backend, "full_shard")
    with pytest.raises(Exception, match=block) as told, unishard.prepare(TRAINED[kind].built(), cfg) as engine:
        engine.backward(loss_of(engine, words_of(0, engine.rank), kind))
    said = f"{told.type.__name__}: {told.value}"
    assert kind == "outside" or said.startswith("ModelError: a weight is used outside the forward of its module")
