"""Gradients and parameters by name: what a user reads is what plain torch has, what a user writes is what the update
uses."""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import pytest
import torch
from harness import EACH, config, everyones, in_ranks, my_rank, own_share, play, prepare, refused, update, values
from harness.training import BACKENDS, DEEP, FEWER_SPANNING, SPANNING
from torch import nn
from torch.nn import functional

import unishard
from dev.ranks.recording import Recorder
from unishard.testing import oracle
from unishard.testing.models import MODELS, MlpOutput

EXTRAS = {
    "plain": {},
    "offload": {"offload": {"optimizer": "cpu"}},
    "offload all": {"offload": "cpu"},
    "groups": {
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "groups": [{"params": [r"^blocks\.[01]"], "lr": 0.1}]}
    },
}
PLACES = (
    ("fsdp", "no_shard", "fp32", "plain"),
    ("fsdp", "no_shard", "bf16", "plain"),
    ("fsdp", "shard_optimizer", "bf16", "plain"),
    ("fsdp", "shard_optimizer", "fp32", "plain"),
    ("fsdp", "shard_grad_op", "fp32", "plain"),
    ("fsdp", "shard_grad_op", "bf16", "offload"),
    ("fsdp", "full_shard", "bf16", "plain"),
    ("fsdp", "full_shard", "fp32", "offload all"),
    ("deepspeed", "no_shard", "fp32", "plain"),
    ("deepspeed", "no_shard", "bf16", "plain"),
    ("deepspeed", "shard_optimizer", "fp32", "plain"),
    ("deepspeed", "shard_optimizer", "fp32", "offload"),
    ("deepspeed", "shard_grad_op", "fp32", "plain"),
    ("deepspeed", "shard_grad_op", "bf16", "plain"),
    ("deepspeed", "shard_grad_op", "bf16", "offload"),
    ("deepspeed", "full_shard", "bf16", "plain"),
    ("deepspeed", "full_shard", "fp32", "offload"),
    ("deepspeed", "full_shard", "bf16", "offload all"),
    ("deepspeed", "shard_optimizer", "fp32", "groups"),
    ("deepspeed", "shard_grad_op", "bf16", "groups"),
    ("deepspeed", "full_shard", "bf16", "groups"),
)
"""Every form that an engine takes: backend, strategy, precision, what else is set."""
OTHERS = {
    (backend, extra): (backend, strategy, precision, extra)
    for backend, strategy, precision, extra in PLACES
    if extra != "plain"
}
SPANNED = (*((*cell, "plain") for cell in SPANNING), *OTHERS.values())
"""Every strategy of each backend in one precision, and one place for everything else that is set."""
FEW = SPANNED if DEEP else tuple((*cell, "plain") for cell in FEWER_SPANNING)
"""For what the core does around any of them."""
NAMES = [name for name, _ in MODELS["mlp"].build().named_parameters()]


def configured(place, accumulation=2, **sections):
    backend, strategy, precision, extra = place
    sections.setdefault("training", {"gradient_accumulation_steps": accumulation})
    return config(backend, strategy, **({"precision": precision} | EXTRAS[extra] | sections))


def whole_window(engine, micro_batches):
    """Everything of a window but the last step."""
    for micro_batch in micro_batches[:-1]:
        engine.backward(engine(**micro_batch).loss)
        engine.step()
    engine.backward(engine(**micro_batches[-1]).loss)


# -- what is read ----------------------------------------------------------------------------------


def read(*place):
    """In the second window of two: gradients, their norms and that of the step; after it masters and their norms."""
    with prepare(configured(place)) as engine:
        micro_batches = own_share(4)
        whole_window(engine, micro_batches[:2])
        engine.step()
        whole_window(engine, micro_batches[2:])
        gradients = {name: engine.gradients.read(name) for name in NAMES}
        again = {name: engine.gradients.read(name) for name in NAMES}
        norms = engine.gradients.norms()
        step = engine.step(clip_grad_norm=0.5)
        masters = {name: engine.weights.read(name) for name in NAMES}
        kinds = {
            (tensor.dtype, tensor.device.type, tensor.is_contiguous())
            for tensor in (*gradients.values(), *masters.values())
        }
        return {
            "gradients": gradients,
            "repeatable": all(torch.equal(gradients[name], again[name]) for name in NAMES),
            "norms": norms,
            "step": step.grad_norm,
            "masters": masters,
            "master norms": engine.weights.norms(),
            "kinds": kinds,
        }


REPEATED = (
    ("fsdp", "no_shard", "bf16", "plain"),
    ("fsdp", "shard_grad_op", "fp32", "plain"),
    ("deepspeed", "no_shard", "bf16", "plain"),
    ("deepspeed", "shard_optimizer", "fp32", "plain"),
    ("deepspeed", "shard_grad_op", "bf16", "plain"),
    ("deepspeed", "shard_optimizer", "fp32", "offload"),
    ("deepspeed", "shard_optimizer", "fp32", "groups"),
)
"""Forms whose strategy or precision others have with the same engine."""
READ = {
    2: tuple(place for place in PLACES if DEEP or place not in REPEATED),
    4: PLACES[6:7] + PLACES[15:16],
}
WORLDS = [(world, place) for world, places in READ.items() for place in places]


@cache
def expected(precision, world):
    """Gradients before the second update, and masters after it."""
    found = {}

    def before(update, model):
        found["gradients"] = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    model = MODELS["mlp"].build()
    windows = [everyones(0, 2, world=world), everyones(2, 4, world=world)]
    oracle.train(
        model, windows, config("fsdp", precision=precision), world=world, clips=[None, 0.5], before_update=before
    )
    return found["gradients"], {name: parameter.detach() for name, parameter in model.named_parameters()}


def worst(found, wanted):
    """Largest difference of a tensor, relative to its norm, or to a hundredth of all: one element is a sum of terms of
    both signs."""
    assert found.keys() == wanted.keys()
    floor = torch.stack([value.norm() for value in wanted.values()]).norm() / 100
    return max(float((found[name] - wanted[name]).norm() / max(wanted[name].norm(), floor)) for name in wanted)


def bound(backend, strategy, precision, *_):
    """After an update that differs in the last place, a bf16 copy may round otherwise: 2^-8 of a weight."""
    return 5e-6 if precision == "fp32" else 5e-3


def outcome(place, world):
    """What every rank has read; all that so many ranks play they play in the same processes."""
    return values(play(tuple((read, each) for each in READ[world]), world)[read, place])


@pytest.mark.parametrize(("world", "place"), WORLDS, ids=str)
def test_gradients_and_masters_are_those_of_plain_torch_whole_and_in_fp32(world, place):
    gradients, masters = expected(place[2], world)
    for found in outcome(place, world):
        assert worst(found["gradients"], gradients) < bound(*place)
        assert worst(found["masters"], masters) < bound(*place)
        assert found["repeatable"]
        assert found["kinds"] == {(torch.float32, "cpu", True)}


@pytest.mark.parametrize(("world", "place"), WORLDS, ids=str)
def test_norms_are_those_of_the_tensors_and_add_up_to_the_step(world, place):
    ranks = outcome(place, world)
    for found in ranks:
        assert list(found["norms"]) == list(found["master norms"]) == NAMES
        assert found["norms"] == {
            name: pytest.approx(float(found["gradients"][name].norm()), rel=1e-5) for name in NAMES
        }
        assert found["master norms"] == {
            name: pytest.approx(float(found["masters"][name].norm()), rel=1e-5) for name in NAMES
        }
        assert math.hypot(*found["norms"].values()) == pytest.approx(found["step"], rel=1e-5)
        assert found["norms"] == ranks[0]["norms"]
        assert all(type(norm) is float for norm in found["norms"].values())


COUNTED = (
    ("fsdp", "full_shard", "bf16", "plain"),
    ("deepspeed", "shard_grad_op", "bf16", "plain"),
    ("deepspeed", "no_shard", "bf16", "plain"),
)


@in_ranks(cells=COUNTED)
def test_norms_cost_at_most_one_collective_of_a_number_for_each_parameter(*place):
    """Collectives of per-parameter norms, of gradients and of masters: kind, and elements."""
    with prepare(configured(place, accumulation=1)) as engine:
        whole_window(engine, own_share(1))
        engine.gradients.read(NAMES[0])
        recorder = Recorder()
        with recorder:
            recorder.phase = "gradients"
            engine.gradients.norms()
            recorder.phase = "masters"
            engine.weights.norms()
        engine.step()
    found = [(event.phase, event.kind, event.numel) for event in recorder.events if event.numel]
    assert set(found) <= {(phase, "all_reduce", len(NAMES)) for phase in ("gradients", "masters")}
    assert len(found) == len(set(found))
    assert bool(found) == (place[1] != "no_shard")


# -- what is written -------------------------------------------------------------------------------


@in_ranks(cells=SPANNED)
def test_what_is_written_counts_on_every_rank(*place):
    """Every gradient zeroed: the engine stands still. An infinite one replaced, and one made infinite: whether an update
    is skipped is decided by the gradients as they were written. Then every rank writes another value, in any format:
    that of rank 0 counts."""
    rank, elements = my_rank(), sum(parameter.numel() for parameter in MODELS["mlp"].build().parameters())
    optimizer = {"name": "sgd", "lr": 0.1, "weight_decay": 0.0}
    with prepare(configured(place, accumulation=1, optimizer=optimizer)) as engine:
        batches = own_share(5)
        whole_window(engine, batches[:1])
        engine.step()
        before = {name: engine.weights.read(name) for name in NAMES}
        whole_window(engine, batches[1:2])
        for name in NAMES:
            engine.gradients.write(name, torch.zeros_like(engine.gradients.read(name)))
        zeroed = engine.step()
        moved = max(float((engine.weights.read(name) - before[name]).abs().max()) for name in NAMES)
        loss = engine(**batches[2]).loss
        engine.backward(loss * math.inf if rank == 1 else loss)
        for name in NAMES:
            engine.gradients.write(name, torch.ones_like(engine.gradients.read(name)))
        replaced = engine.step()
        whole_window(engine, batches[3:4])
        engine.gradients.write(NAMES[-1], engine.gradients.read(NAMES[-1]).fill_(math.inf))
        put_in = engine.step()
        whole_window(engine, batches[4:])
        engine.gradients.write(
            NAMES[0], torch.full_like(engine.gradients.read(NAMES[0]), rank + 1.0, dtype=torch.bfloat16)
        )
        engine.weights.write(NAMES[0], torch.full_like(engine.weights.read(NAMES[0]), rank + 2.0, dtype=torch.float64))
        with engine.weights.gathered([NAMES[1]]) as tensors:
            tensors[NAMES[1]].fill_(rank + 3.0)
        own = [engine.gradients.read(NAMES[0]), engine.weights.read(NAMES[0]), engine.weights.read(NAMES[1])]
    assert moved == 0.0
    assert zeroed == unishard.Step(updated=True, grad_norm=0.0, lr=0.1, skipped=False)
    assert (replaced.updated, replaced.skipped) == (True, False)
    assert replaced.grad_norm == pytest.approx(math.sqrt(elements), rel=1e-5)
    assert (put_in.updated, put_in.skipped) == (False, True)
    assert [tensor.unique().tolist() for tensor in own] == [[1.0], [2.0], [3.0]]


@in_ranks(cells=SPANNED if DEEP else SPANNED[: len(SPANNING)])
def test_gradients_of_sums_over_items_are_shown_and_set_as_those_of_the_mean(*place):
    """Before and after one is doubled, and the norm of the step."""
    model, losses = MODELS["mlp"].build(), []

    def loss_of(logits, micro_batch, turn, rank):
        counts = 1 if rank == turn else 2
        return functional.cross_entropy(logits[:counts], micro_batch["labels"][:counts], reduction="sum"), counts

    for (turn, rank), batch in zip(product(range(2), range(2)), everyones(0, 2, world=2), strict=True):
        losses.append(loss_of(model(**batch).logits, batch, turn, rank)[0])
    (sum(losses) / 6).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    with prepare(configured(place)) as engine:
        for turn, micro_batch in enumerate(own_share(2)):
            loss, counts = loss_of(engine(**micro_batch).logits.float(), micro_batch, turn, my_rank())
            engine.backward(loss, num_items=counts)
            if turn == 0:
                engine.step()
        before = {name: engine.gradients.read(name) for name in NAMES}
        engine.gradients.write(NAMES[0], before[NAMES[0]] * 2)
        doubled, norms, step = engine.gradients.read(NAMES[0]), engine.gradients.norms(), engine.step()
    assert worst(before, wanted) < (5e-6 if place[2] == "fp32" else 3e-2)
    assert torch.allclose(doubled, before[NAMES[0]] * 2, rtol=1e-6)
    assert math.hypot(*norms.values()) == pytest.approx(step.grad_norm, rel=1e-5)


# -- tied, frozen and unused parameters ------------------------------------------------------------


class Kinds(nn.Module):
    """A tied head, a frozen layer, a branch that runs when told to."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.frozen = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.sometimes = nn.Linear(7, 7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, x, both=False):
        hidden = self.frozen(self.embedding(x))
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        logits = self.head(hidden + self.sometimes(hidden) if both else hidden)
        return MlpOutput(functional.cross_entropy(logits.float(), x), logits)


@in_ranks(cells=SPANNED)
def test_tied_frozen_and_unused_parameters(*place):
    torch.manual_seed(5)
    x = torch.arange(my_rank(), my_rank() + 6)
    native = {"fsdp": {"find_unused_parameters": True}} if place[:3] == ("fsdp", "no_shard", "fp32") else {}
    with unishard.prepare(Kinds(), configured(place, accumulation=1, native=native)) as engine:
        engine.backward(engine(x, both=True).loss)
        tied = torch.equal(engine.gradients.read("head.weight"), engine.gradients.read("embedding.weight"))
        names, all_names, frozen = (
            engine.gradients.norms(),
            engine.weights.norms(),
            engine.gradients.read("frozen.weight"),
        )
        engine.step()
        engine.backward(engine(x).loss)
        unused, norms = engine.gradients.read("sometimes.weight"), engine.gradients.norms()
        engine.gradients.write("sometimes.weight", torch.ones(7, 7))
        norm = math.hypot(*engine.gradients.norms().values())
        step = engine.step()
        with engine.weights.gathered(["embedding.weight", "head.weight", "frozen.weight"]) as tensors:
            shared = tensors["embedding.weight"] is tensors["head.weight"]
            tensors["head.weight"].fill_(0.5)
            tensors["frozen.weight"].fill_(0.25)
        engine.weights.write("frozen.bias", torch.full((7,), 1.5))
        written = [engine.weights.read(name) for name in ("embedding.weight", "frozen.weight", "frozen.bias")]
        with torch.no_grad():
            logits = engine.eval()(x).logits.float()
    trainable = ["embedding.weight", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias"]
    assert list(names) == [*trainable, "sometimes.weight", "sometimes.bias"]
    assert set(all_names) == {*names, "frozen.weight", "frozen.bias"}
    assert tied is shared is True
    assert frozen is unused is None
    assert "sometimes.weight" not in norms
    assert norm == pytest.approx(step.grad_norm, rel=1e-5)
    assert [tensor.unique().tolist() for tensor in written] == [[0.5], [0.25], [1.5]]
    assert logits.max() - logits.min() < 1e-4, (
        "the head and the embedding are constant, so every logit must be the same"
    )


# -- dropping a window -----------------------------------------------------------------------------


def validated_after_a_discard(engine):
    """Which batches a loop sees when every window is dropped at its first, and how many a validation loop inside it
    sees."""
    seen, validated = [], 0
    for index, micro_batch in enumerate(engine.batches(own_share(4))):
        engine.backward(engine(**micro_batch).loss)
        engine.discard()
        engine.eval()
        with torch.no_grad():
            validated += sum(1 for _ in engine.batches(own_share(3)))
        engine.train()
        seen.append(index)
    return len(seen), validated


@in_ranks(cells=FEW)
def test_after_a_discard_the_next_window_is_clean_and_whole(*place):
    """What a loop by hand sees: steps after each discard, and what follows beside that without what was dropped."""
    wanted = MODELS["mlp"].build()
    norm = oracle.train(wanted, [everyones(0, 2, world=2)], config("fsdp", precision=place[2]), world=2).norms[0]
    masters = {name: parameter.detach() for name, parameter in wanted.named_parameters()}
    with prepare(configured(place)) as engine:
        engine.discard()  # nothing is pending
        batches = own_share(6)
        engine(**batches[4])
        engine.discard()
        engine.backward(engine(**batches[5]).loss * math.inf)
        engine.step()
        engine.discard()
        said = refused(engine.step)
        batches_seen = validated_after_a_discard(engine)
        for micro_batch in batches[2:4]:
            engine.backward(engine(**micro_batch).loss, num_items=0)
            nothing = refused(engine.step)
        inside, step = [update(engine, micro_batch) for micro_batch in batches[:2]]
        lr, parameters = engine.lr, {name: engine.weights.read(name) for name in NAMES}
    assert said.startswith("ContractError: step was called without a backward")
    assert batches_seen == (2, 6)
    assert nothing.startswith("ContractError: num_items add up to 0")
    assert (inside.updated, step.updated) == (False, True)
    assert step.grad_norm == pytest.approx(norm, rel=bound(*place))
    assert lr == 0.1
    assert worst(parameters, masters) < bound(*place)


# -- what is refused -------------------------------------------------------------------------------


def edit(engine, names, change):
    with engine.weights.gathered(names) as tensors:
        change(tensors)


@in_ranks(
    cells=tuple((backend, strategy) for backend in BACKENDS for strategy in ("no_shard", "full_shard")), in_turn=True
)
def test_calls_that_have_no_meaning_are_refused_with_what_to_do_instead(backend, strategy):
    name, wrong = "head.weight", []

    def says(words, call, *arguments):
        told = refused(call, *arguments)
        if not (told.startswith("ContractError: ") and words in told):
            wrong.append((words, told))

    with prepare(config(backend, strategy, training={"gradient_accumulation_steps": 2})) as engine:
        first, second = own_share(2)
        zeros = torch.zeros(engine.weights.read(name).shape)
        says("gradients.read was called after 0 of 2 backward calls", engine.gradients.read, name)
        loss = engine(**first).loss
        graph = "call it after backward, or drop the forward with engine.discard()"
        says(graph, engine.weights.write, name, zeros)
        engine.backward(loss)
        says("gradients.write was called after 1 of 2 backward calls", engine.gradients.write, name, zeros)
        engine.step()
        says("call it between the last backward of a window and engine.step()", engine.gradients.norms)
        engine.backward(engine(**second).loss)
        near = "gradients.read: the model has no parameter 'head.wieght'; did you mean head.weight"
        says(near, engine.gradients.read, "head.wieght")
        says("weights.read: the model has no parameter 'zzz'; the first of", engine.weights.read, "zzz")
        says(
            "gradients.write: head.weight has the shape (11, 23), got (2, 2)",
            engine.gradients.write,
            name,
            zeros[:2, :2],
        )
        says("gradients.write: head.weight needs a floating-point tensor, got float", engine.gradients.write, name, 0.0)
        integers = "weights.write: head.weight needs a floating-point tensor, got torch.int64"
        says(integers, engine.weights.write, name, zeros.long())
        says("write gathered(['head.weight'])", edit, engine, name, dict.clear)
        says("only edit its tensors", edit, engine, [name], dict.clear)
        replaced = "weights.gathered: head.weight has the shape (11, 23), got (3,)"
        says(replaced, edit, engine, [name], lambda tensors: tensors.update({name: torch.zeros(3)}))
        engine.step()
        says("gradients.read was called after 0 of 2 backward calls", engine.gradients.read, name)
    for call in (engine.gradients.read, engine.weights.read):
        says("closed engine", call, name)
    for call in (engine.gradients.norms, engine.weights.norms, engine.discard):
        says("closed engine", call)
    assert wrong == []


@in_ranks(cells=EACH, in_turn=True)
def test_a_gradient_for_a_frozen_parameter_is_refused(backend):
    with unishard.prepare(Kinds(), config(backend)) as engine:
        engine.backward(engine(torch.arange(6), both=True).loss)
        told = refused(engine.gradients.write, "frozen.weight", torch.ones(7, 7))
    assert told.startswith("ContractError: gradients.write: frozen.weight is frozen")


# -- complex parameters ----------------------------------------------------------------------------


class Turned(nn.Module):
    """Turns its input by a frozen complex parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.turn = nn.Parameter(torch.polar(torch.ones(13), torch.linspace(0, 3, 13)), requires_grad=False)
        self.head = nn.Linear(13, 11)

    def forward(self, x, labels):
        logits = self.head((x.float() * self.turn).imag.to(x.dtype))
        return MlpOutput(functional.cross_entropy(logits.float(), labels), logits)


@in_ranks(cells=FEWER_SPANNING)
def test_a_frozen_complex_parameter_is_read_and_written_whole(backend, strategy, precision):
    """Before and after edits by both calls: the value, its norm, the loss; and what a real parameter says to a complex
    value."""
    with unishard.prepare(Turned(), config(backend, strategy, precision=precision)) as engine, torch.no_grad():

        def look():
            loss = engine.mean(engine(**own_share(1)[0]).loss)
            return engine.weights.read("turn"), engine.weights.norms()["turn"], loss

        found = [look()]
        engine.weights.write("turn", found[0][0] * 1j)
        found.append(look())
        with engine.weights.gathered(["turn"]) as tensors:
            tensors["turn"].mul_(2j)
        found.append(look())
        said = refused(engine.weights.write, "head.bias", torch.zeros(11, dtype=torch.complex64))
    for (value, norm, _), factor in zip(found, (1, 1j, -2), strict=True):
        assert torch.allclose(value, factor * Turned().turn.detach())
        assert norm == pytest.approx(abs(factor) * 13**0.5)
    assert len({loss for *_, loss in found}) == 3, "the model computes with each of them"
    assert said == "ContractError: weights.write: head.bias needs a floating-point tensor, got torch.complex64"
