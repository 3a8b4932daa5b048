"""Weights that are read outside the forward of their modules: `engine.weights.unsharded` makes every engine train them as plain
torch does."""

from __future__ import annotations

import contextlib
import re
from functools import cache
from itertools import product
from typing import NamedTuple

import pytest
import torch
from harness import BACKENDS, DEEP, EACH, config, in_ranks, play, values
from torch import Tensor, nn
from torch.nn import functional

import unishard
from unishard.testing import oracle

WINDOW, UPDATES, WORDS = 2, 2, 17
OPTIMIZER = {"name": "sgd", "lr": 0.02, "momentum": 0.9}


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


def build() -> Lm:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Lm()


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
ALL = [name for name, _ in build().named_parameters()]
NAMES = {
    "inside": ["head.weight"],
    "outside": ["head.weight"],
    "shared": ["embed.weight", "head.weight"],
    "penalty": ALL,
    "penalty first": ALL,
}


def words_of(micro_batch: int, rank: int) -> Tensor:
    return torch.randint(0, WORDS, (2, 7), generator=torch.Generator().manual_seed(10 * micro_batch + rank))


EXTRAS = {
    "plain": {},
    "reshard": {"sharding": {"reshard_after_forward": 2}},
    "groups": {"sharding": {"group_size": 2}},
    "conditional": {"sharding": {"conditional_modules": ["Head"], "units": ["Block", "Embedding"]}},
}


def configured(backend, strategy, precision, extra="plain"):
    sections = dict(EXTRAS[extra])
    sharding = (
        {"strategy": strategy}
        | ({} if strategy == "no_shard" else {"units": ["Block", "Head", "Embedding"]})
        | sections.pop("sharding", {})
    )
    training = {"gradient_accumulation_steps": WINDOW}
    sections.setdefault("optimizer", OPTIMIZER)
    return config(backend, sharding, **({"precision": precision, "training": training} | sections))


def trained(backend, strategy, precision, kind, extra="plain"):
    """Losses and norms of two updates, and the weights after them."""
    done = []
    with unishard.prepare(build(), configured(backend, strategy, precision, extra)) as engine:
        for micro_batch in range(WINDOW * UPDATES):
            with engine.weights.unsharded(NAMES[kind]) as weights:
                assert {name: weight.shape for name, weight in weights.items()} == {
                    name: weight.shape for name, weight in build().named_parameters() if name in NAMES[kind]
                }
                loss = LOSSES[kind](engine, engine.module, words_of(micro_batch, engine.rank))
                engine.backward(loss)
            step = engine.step()
            done.append((engine.mean(loss), step.grad_norm if step.updated else None))
        return done, {name: engine.weights.read(name) for name in ALL}


@cache
def expected(precision, kind, world=2):
    """The same in plain torch."""
    model = build()
    windows = [
        [{"words": words_of(update * WINDOW + turn, rank)} for turn in range(WINDOW) for rank in range(world)]
        for update in range(UPDATES)
    ]
    summed = oracle.Summed(lambda model, batch: LOSSES[kind](model, model, batch["words"]), lambda batch: 1)
    curve = oracle.train(
        model, windows, config("fsdp", precision=precision, optimizer=OPTIMIZER), world=world, summed=summed
    )
    return curve, {name: parameter.detach() for name, parameter in model.named_parameters()}


CELLS = [
    *(
        (backend, "full_shard", "fp32", kind)
        for turn, backend in enumerate(BACKENDS)
        for number, kind in enumerate(LOSSES)
        if DEEP or (turn + number) % 2
    ),
    *((backend, "full_shard", "bf16", "penalty first") for backend in BACKENDS),
    *((backend, "full_shard", "bf16", "outside") for backend in BACKENDS if DEEP),
    *((backend, "full_shard", "bf16", "penalty first", "conditional") for backend in BACKENDS),
    ("fsdp", "no_shard", "bf16", "penalty first"),
    ("fsdp", "shard_optimizer", "bf16", "penalty first"),
    ("deepspeed", "shard_optimizer", "bf16", "outside"),
]
GROUPS = [
    ("fsdp", "full_shard", "fp32", "penalty first", "reshard"),
    ("deepspeed", "full_shard", "fp32", "penalty first", "reshard"),
    ("fsdp", "hybrid_shard", "bf16", "penalty first", "groups"),
]


def check(cell, world):
    *_, precision, kind = cell[:4]
    curve, weights = expected(precision, kind, world)
    small = precision == "fp32"
    cells = SCENARIOS if world == 2 else tuple((trained, each) for each in GROUPS)
    for done, found in values(play(cells, world)[trained, cell]):
        losses = [
            sum(loss for loss, _ in done[start : start + WINDOW]) / WINDOW for start in range(0, len(done), WINDOW)
        ]
        norms = [norm for _, norm in done if norm is not None]
        assert losses == pytest.approx(curve.losses, abs=1e-6 if small else 2e-3)
        assert norms == pytest.approx(curve.norms, rel=1e-5 if small else 2e-3)
        for name in ALL:
            assert torch.allclose(found[name], weights[name], rtol=0, atol=1e-5 if small else 2e-4), name


def in_turn(backend, strategy):
    """What a script does with the block besides training: numbers that no strategy and no engine changes."""
    with unishard.prepare(build(), configured(backend, strategy, "fp32")) as engine:
        model, words = engine.module, words_of(0, engine.rank)
        found = []

        def update(loss):
            for _ in range(WINDOW):
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
        update_of_window(engine, model, words, found)
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


def update_of_window(engine, model, words, found):
    """The rest of a window, with a block that is entered after the forward."""
    hidden = engine(words).hidden
    with engine.weights.unsharded(ALL):
        engine.backward(chunked(hidden, model.head.weight, words) + penalty(model))
    found.append(engine.step().grad_norm)


@in_ranks(cells=EACH)
def test_weights_are_full_in_inference(backend):
    model = unishard.prepare(build(), configured(backend, "full_shard", "fp32"), train=False)
    with torch.no_grad(), model as engine, engine.weights.unsharded(["head.weight"]) as weights:
        words = words_of(0, engine.rank)
        found = [engine(words, fused=True).loss, chunked(engine(words).hidden, weights["head.weight"], words)]
    assert list(map(float, found)) == pytest.approx([float(build()(words, fused=True).loss.detach())] * 2, abs=1e-6)


@in_ranks(cells=tuple(product(BACKENDS, ("outside", "penalty"))), in_turn=True)
def test_an_error_without_it_names_it(backend, kind):
    block = re.escape("put the forward and the backward into a block `with engine.weights.unsharded([name, ...]):`")
    cfg = configured(backend, "full_shard", "fp32")
    with pytest.raises(Exception, match=block) as told, unishard.prepare(build(), cfg) as engine:
        engine.backward(LOSSES[kind](engine, engine.module, words_of(0, engine.rank)))
    said = f"{told.type.__name__}: {told.value}"
    assert kind == "outside" or said.startswith("ModelError: a weight is used outside the forward of its module")


PLACES = [(backend, strategy) for backend in BACKENDS for strategy in ("no_shard", "full_shard")]
SCENARIOS = (
    *((trained, cell) for cell in CELLS),
    *((in_turn, place) for place in PLACES),
)


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_it_trains_as_plain_torch(cell):
    check(cell, 2)


@pytest.mark.parametrize("cell", GROUPS, ids="-".join)
def test_it_trains_as_plain_torch_in_groups_of_ranks(cell):
    check(cell, 4)


@pytest.mark.parametrize("place", PLACES[1:], ids="-".join)
def test_it_ends_and_begins_where_a_script_likes(place):
    played = play(SCENARIOS)
    for found, right in zip(values(played[in_turn, place]), values(played[in_turn, PLACES[0]]), strict=True):
        assert found == pytest.approx(right, rel=1e-5)
