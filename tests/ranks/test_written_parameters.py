"""Parameters that are written past the engine, in the forward or between two updates: one error that names them, on
every engine."""

from __future__ import annotations

import pytest
import torch
from harness import BACKENDS, PAIRS, config, in_ranks, my_rank, refused
from harness.training import DEEP
from torch import nn

import unishard

WORLD = 2
CELLS = tuple((*pair, "fp32") for pair in PAIRS if pair[1] != "no_shard") + tuple(
    (backend, "no_shard", "bf16") for backend in BACKENDS
)
GATHERING = tuple(cell for cell in CELLS if DEEP or cell[1] == "full_shard")


def in_place(parameter):
    parameter.mul_(0.5)


def through_data(parameter):
    parameter.data.mul_(0.5)


def by_new_data(parameter):
    parameter.data = parameter.data * 0.5


WAYS = (in_place, through_data, by_new_data)


class Part(nn.Module):
    """May write its own weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.inner = nn.Linear(8, 8)
        self.write = None

    def forward(self, x):
        if self.write:
            with torch.no_grad():
                self.write(self.weight)
        return torch.tanh(self.inner(x @ self.weight))


class Stem(Part):
    """Outside the units."""


class Net(nn.Module):
    """A stem, two units and a head; may write the weight of a unit."""

    def __init__(self):
        super().__init__()
        self.stem = Stem()
        self.parts = nn.ModuleList(Part() for _ in range(2))
        self.head = nn.Linear(8, 1)
        self.write = None

    def forward(self, x):
        if self.write:
            with torch.no_grad():
                self.write(self.parts[1].weight)
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        return self.head(x).square().mean()


PLACES = {
    "a unit": ("parts.0", "parts.0.weight"),
    "its parent": ("", "parts.1.weight"),
    "the root": ("stem", "stem.weight"),
}


def prepared(backend, strategy, precision="fp32", **sections):
    torch.manual_seed(5)
    sharding = strategy if strategy == "no_shard" else {"strategy": strategy, "units": ["Part"]}
    return unishard.prepare(Net(), config(backend, sharding, precision=precision, **sections))


def inputs(update, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * update + rank))


def update(engine, number):
    loss = engine(inputs(number, my_rank()))
    engine.backward(loss)
    engine.step()
    return loss.item()


def gathered(backend, strategy):
    """Whether to read a parameter in a forward gathers it for that, so that a write through `data` leaves no trace."""
    return (backend, strategy) == ("deepspeed", "full_shard")


@in_ranks(
    cells=tuple((*cell, place) for cell in CELLS for place in PLACES if DEEP or place == "a unit" or cell in GATHERING)
)
def test_a_parameter_that_the_forward_writes_is_named(backend, strategy, precision, place):
    """By each way in one of the first updates; good ones in between."""
    said = {}
    with prepared(backend, strategy, precision) as engine:
        writer = engine.module.get_submodule(PLACES[place][0])
        for number, way in enumerate(WAYS):
            writer.write = way
            said[way] = refused(engine, inputs(number, my_rank()))
            writer.write = None
            engine.discard()
            update(engine, number)
    wanted = f"ContractError: the forward writes parameter {PLACES[place][1]}, of which it has only a shard"
    for way, message in said.items():
        if way is in_place or not (gathered(backend, strategy) and place == "its parent"):
            assert message.startswith(wanted), way


class Router(nn.Module):
    """Converts its layer in each forward, as the router of NLLB-MoE does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer.to(torch.float32)(x.float()).to(x.dtype)


CONVERTED = (
    ("fsdp", "full_shard"),
    ("fsdp", "shard_grad_op"),
    ("fsdp", "shard_optimizer"),
    ("deepspeed", "shard_optimizer"),
)


@in_ranks(cells=CONVERTED)
def test_a_layer_that_the_forward_of_its_parent_converts_is_named(backend, strategy):
    sharding = {"strategy": strategy, "units": ["Router"]}
    with unishard.prepare(nn.Sequential(Router(), Router()), config(backend, sharding, precision="bf16")) as engine:
        said = refused(engine, inputs(0, my_rank()))
    assert said.startswith("ContractError: the forward writes parameter 0.layer.weight")


@in_ranks(cells=CELLS)
def test_a_parameter_that_is_written_between_updates_is_named(backend, strategy, precision):
    said = {}
    with prepared(backend, strategy, precision) as engine:
        for number, way in enumerate(WAYS):
            with torch.no_grad():
                way(engine.module.parts[0].weight)
            said[way] = refused(engine, inputs(number, my_rank()))
            engine.discard()
            update(engine, number)
    for way, message in said.items():
        since = "unishard.prepare" if way is WAYS[0] else "the last update"
        wanted = f"ContractError: parameter parts.0.weight changed since {since}, but not by"
        assert message.startswith(wanted), way


@in_ranks(cells=GATHERING)
def test_a_parameter_that_a_hook_of_its_unit_writes_is_named(backend, strategy, precision):
    """Registered before `prepare`; it runs before the unit's forward, and after it."""
    for when in ("register_forward_pre_hook", "register_forward_hook"):
        model = Net()
        getattr(model.parts[0], when)(lambda part, *given: in_place(part.weight.detach()))
        sharding = strategy if strategy == "no_shard" else {"strategy": strategy, "units": ["Part"]}
        with unishard.prepare(model, config(backend, sharding, precision=precision)) as engine:
            said = (refused(engine, inputs(0, my_rank())) for _ in range(2))
            first = next(message for message in said if message != "nothing")
        assert first.startswith("ContractError: the forward writes parameter parts.0.weight, of which it has only"), (
            when
        )


@in_ranks(cells=GATHERING)
def test_what_is_replaced_before_the_first_forward_is_named_and_reading_is_no_write(backend, strategy, precision):
    """After new data or a new parameter, and after an evaluation and a read that write nothing."""
    with prepared(backend, strategy, precision) as engine:
        by_new_data(engine.module.parts[0].weight)
        data = refused(engine, inputs(0, my_rank()))
    with prepared(backend, strategy, precision) as engine:
        engine.module.parts[0].weight = nn.Parameter(torch.ones(8, 8))
        parameter = refused(engine, inputs(0, my_rank()))
    reading = []
    for evaluates in (False, True):
        with prepared(backend, strategy, precision) as engine:
            with torch.no_grad(), engine.weights.unsharded(["parts.0.weight"]):
                pass
            if evaluates:
                engine.eval()
                engine(inputs(0, my_rank()))
                engine.train()
            reading.append(refused(update, engine, 0))
    named = "ContractError: parameter parts.0.weight changed since unishard.prepare"
    assert data.startswith(named) or gathered(backend, strategy)
    replaced = "ContractError: parameter parts.0.weight was added or replaced after unishard.prepare"
    assert parameter.startswith(replaced)
    assert reading == ["nothing", "nothing"]


@in_ranks(cells=(("fsdp", "full_shard"),))
def test_a_parameter_of_before_that_a_list_holds_is_named_if_it_is_written(backend, strategy):
    """As a model does that keeps masks and masked weights in lists. A mask that changes nothing ends no run."""
    torch.manual_seed(5)
    model = Net()
    kept = [model.parts[0].weight]
    sharding = {"strategy": strategy, "units": ["Part"]}
    with unishard.prepare(model, config(backend, sharding)) as engine:
        kept[0].data.mul_(torch.ones(8, 8))
        update(engine, 0)
        through_data(kept[0])
        between = refused(engine, inputs(1, my_rank()))
        engine.discard()
        engine.module.write = lambda weight: through_data(kept[0])
        inside = refused(engine, inputs(1, my_rank()))
        engine.discard()
        kept.clear()
        engine.module.write = None
        update(engine, 2)
    assert between.startswith("ContractError: parameter parts.0.weight changed since the last update, but not by")
    assert inside.startswith("ContractError: the forward writes parameter parts.0.weight, of which it has only a shard")


SHARDED = (("fsdp", "full_shard"), ("deepspeed", "shard_optimizer"))


LATER = {"in place": in_place, "through data": through_data}


@in_ranks(cells=tuple((*cell, way) for cell in SHARDED for way in LATER))
def test_a_write_that_begins_later_is_found(backend, strategy, way):
    """In the forward from the 13th update on, in the second micro-batch of each; through `data` by a sample."""
    with prepared(backend, strategy, training={"gradient_accumulation_steps": 2}) as engine:
        for number in range(120):
            engine.module.parts[0].write = LATER[way] if number >= 25 and number % 2 else None
            if refused(update, engine, number) != "nothing":
                break
    assert number == 25 if way == "in place" else 25 < number < 119


class Adversary(nn.Sequential):
    """Two parts, and a head."""

    def __init__(self):
        super().__init__(Part(), Part(), nn.Linear(8, 1))


@in_ranks(cells=SHARDED)
def test_two_forwards_of_a_window_and_one_of_a_frozen_model_write_nothing(backend, strategy):
    """The loop of a GAN, whose discriminator sees real and generated samples, and then only passes gradients on."""
    sharding = {"strategy": strategy, "units": ["Part"]}
    torch.manual_seed(5)
    cfg = config(backend, sharding)
    losses = []
    with (
        unishard.prepare(nn.Sequential(Part(), Part()), cfg) as makes,
        unishard.prepare(Adversary(), cfg) as judges,
    ):
        for number in range(4):
            with torch.no_grad():
                made = makes(inputs(number, my_rank()))
            loss = nn.functional.softplus(-judges(inputs(number + 9, my_rank()))).mean()
            judges.backward(loss + nn.functional.softplus(judges(made)).mean())
            judges.step()
            with judges.weights.frozen():
                makes.backward(nn.functional.softplus(-judges(makes(inputs(number, my_rank())))).mean())
            losses.append(makes.step().grad_norm)
    assert all(loss > 0 for loss in losses)


@in_ranks(cells=SHARDED)
def test_the_way_on_trains_as_plain_torch(backend, strategy):
    """A training that clamps a weight after each update."""
    with prepared(backend, strategy) as engine:
        found = []
        for number in range(4):
            loss = engine(inputs(number, my_rank()))
            engine.backward(loss)
            engine.step()
            found.append(float(engine.mean(loss)))
            with engine.weights.gathered(["parts.0.weight"]) as weights:
                weights["parts.0.weight"].clamp_(-0.1, 0.1)
            engine.weights.write("head.bias", torch.zeros(1))
            engine.eval()
            engine(inputs(number, my_rank()))
            engine.train()
    torch.manual_seed(5)
    model, right = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(4):
        optimizer.zero_grad()
        loss = sum(model(inputs(number, rank)) for rank in range(WORLD)) / WORLD
        loss.backward()
        optimizer.step()
        right.append(loss.item())
        with torch.no_grad():
            model.parts[0].weight.clamp_(-0.1, 0.1)
            model.head.bias.zero_()
    assert found == pytest.approx(right, rel=1e-6)
