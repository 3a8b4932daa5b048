"""Parameters that are written past the engine, in the forward or between two updates: one error that names them, on
every engine."""

from __future__ import annotations

import pytest
import torch
from harness import BACKENDS, STRATEGIES, config, my_rank, play, refused, values
from torch import nn

import unishard

WORLD = 2
CELLS = tuple((backend, strategy, "fp32") for backend in BACKENDS for strategy in STRATEGIES[1:]) + tuple(
    (backend, "no_shard", "bf16") for backend in BACKENDS
)


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


def prepared(backend, strategy, precision="fp32"):
    torch.manual_seed(5)
    sharding = strategy if strategy == "no_shard" else {"strategy": strategy, "units": ["Part"]}
    return unishard.prepare(Net(), config(backend, sharding, precision=precision))


def inputs(update, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * update + rank))


def update(engine, number):
    loss = engine(inputs(number, my_rank()))
    engine.backward(loss)
    engine.step()
    return loss.item()


def inside(backend, strategy, precision, place):
    """What a forward that writes says, by each way in one of the first updates; good ones in between."""
    said = []
    with prepared(backend, strategy, precision) as engine:
        writer = engine.module.get_submodule(PLACES[place][0])
        for number, way in enumerate(WAYS):
            writer.write = way
            said.append(refused(engine, inputs(number, my_rank())))
            writer.write = None
            engine.discard()
            update(engine, number)
    return said


def between(backend, strategy, precision):
    """The same for what is written before a forward."""
    said = []
    with prepared(backend, strategy, precision) as engine:
        for number, way in enumerate(WAYS):
            with torch.no_grad():
                way(engine.module.parts[0].weight)
            said.append(refused(engine, inputs(number, my_rank())))
            engine.discard()
            update(engine, number)
    return said


def hooked(backend, strategy, precision):
    """What a forward says whose hook, registered before `prepare`, writes a weight of its unit: before the unit's
    forward, and after it."""
    said = []
    for when in ("register_forward_pre_hook", "register_forward_hook"):
        model = Net()
        getattr(model.parts[0], when)(lambda part, *given: through_data(part.weight))
        sharding = strategy if strategy == "no_shard" else {"strategy": strategy, "units": ["Part"]}
        with unishard.prepare(model, config(backend, sharding, precision=precision)) as engine:
            said.append(refused(engine, inputs(0, my_rank())))
    return said


def replaced(backend, strategy, precision):
    """What the first forward says after new data or a new parameter, and after an evaluation and a read that write
    nothing."""
    said = []
    with prepared(backend, strategy, precision) as engine:
        by_new_data(engine.module.parts[0].weight)
        said.append(refused(engine, inputs(0, my_rank())))
    with prepared(backend, strategy, precision) as engine:
        engine.module.parts[0].weight = nn.Parameter(torch.ones(8, 8))
        said.append(refused(engine, inputs(0, my_rank())))
    for evaluates in (False, True):
        with prepared(backend, strategy, precision) as engine:
            with torch.no_grad(), engine.unsharded(["parts.0.weight"]):
                pass
            if evaluates:
                engine.eval()
                engine(inputs(0, my_rank()))
                engine.train()
            said.append(refused(update, engine, 0))
    return said


def later(backend, strategy):
    """The update in which a forward is refused that writes from the 13th on."""
    with prepared(backend, strategy) as engine:
        for number in range(30):
            engine.module.parts[0].write = in_place if number >= 12 else None
            if refused(update, engine, number) != "nothing":
                return number
    return None


def clamped(backend, strategy):
    """The losses of a training that clamps a weight after each update, and those of plain torch."""
    with prepared(backend, strategy) as engine:
        found = []
        for number in range(4):
            loss = engine(inputs(number, my_rank()))
            engine.backward(loss)
            engine.step()
            found.append(float(engine.mean(loss)))
            with engine.gathered(["parts.0.weight"]) as weights:
                weights["parts.0.weight"].clamp_(-0.1, 0.1)
            engine.set_parameter("head.bias", torch.zeros(1))
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
    return found, right


SHARDED = tuple((backend, strategy) for backend in BACKENDS for strategy in ("shard_optimizer", "full_shard"))
INSIDE = tuple((inside, (*cell, place)) for cell in CELLS for place in PLACES)
BETWEEN = tuple((between, cell) for cell in CELLS)
HOOKED = tuple((hooked, cell) for cell in CELLS)
REPLACED = tuple((replaced, cell) for cell in CELLS)
OTHERS = tuple((scenario, cell) for scenario in (later, clamped) for cell in SHARDED)
ALL = INSIDE + BETWEEN + HOOKED + REPLACED + OTHERS


def empty(cell):
    """Whether a parameter has no elements where its module does not run, so that a write through `data` leaves no
    trace."""
    return cell[:2] == ("deepspeed", "full_shard")


@pytest.mark.parametrize(
    ("scenario", "cell"), INSIDE, ids=lambda value: "-".join(value) if isinstance(value, tuple) else ""
)
def test_a_parameter_that_the_forward_writes_is_named(scenario, cell):
    place = cell[-1]
    wanted = f"ContractError: the forward writes parameter {PLACES[place][1]}, of which it has only a shard"
    for said in values(play(ALL)[scenario, cell]):
        for way, message in zip(WAYS, said, strict=True):
            if way is in_place or not (empty(cell) and place == "its parent"):
                assert message.startswith(wanted), (way, message)


@pytest.mark.parametrize(
    ("scenario", "cell"), BETWEEN, ids=lambda value: "-".join(value) if isinstance(value, tuple) else ""
)
def test_a_parameter_that_is_written_between_updates_is_named(scenario, cell):
    for said in values(play(ALL)[scenario, cell]):
        for number, (way, message) in enumerate(zip(WAYS, said, strict=True)):
            if not (empty(cell) and way is not in_place):
                since = "the last update" if number else "unishard.prepare"
                assert message.startswith(
                    f"ContractError: parameter parts.0.weight changed since {since}, but not by"
                ), (
                    way,
                    message,
                )


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_a_parameter_that_a_hook_of_its_unit_writes_is_named(cell):
    wanted = "ContractError: the forward writes parameter parts.0.weight, of which it has only a shard"
    for before, after in values(play(ALL)[hooked, cell]):
        assert after.startswith(wanted)
        assert before.startswith(wanted) or empty(cell)


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_what_is_replaced_before_the_first_forward_is_named_and_reading_is_no_write(cell):
    for data, parameter, *reading in values(play(ALL)[replaced, cell]):
        assert data.startswith("ContractError: parameter parts.0.weight changed since unishard.prepare")
        assert parameter.startswith(
            "ContractError: parameter parts.0.weight was added or replaced after unishard.prepare"
        )
        assert reading == ["nothing", "nothing"]


@pytest.mark.parametrize("cell", SHARDED, ids="-".join)
def test_a_write_that_begins_later_is_found_by_a_sample(cell):
    assert values(play(ALL)[later, cell]) == [20, 20]


@pytest.mark.parametrize("cell", SHARDED, ids="-".join)
def test_the_way_on_trains_as_plain_torch(cell):
    for found, right in values(play(ALL)[clamped, cell]):
        assert found == pytest.approx(right, rel=1e-6)
