"""What lies in host memory: the user's own optimizer steps there, on the same values, and says no to what an engine
cannot do."""

from __future__ import annotations

import math

import pytest
import torch
from harness import assert_conforms, curve, error, my_rank, own_share, play, tolerance, train, values, windows
from harness.training import ACCUMULATION, BACKENDS, MICRO_BATCHES, PRECISIONS, configured, everyones
from torch import nn

import unishard
from dev.ranks.counting import storages
from unishard.testing import oracle
from unishard.testing.models import MlpOutput, mlp

BOTH, ALONE = {"params": "cpu", "optimizer": "cpu"}, {"params": "none", "optimizer": "cpu"}
PLACES = {
    "optimizer, shard_optimizer": ("shard_optimizer", ALONE),
    "optimizer, shard_grad_op": ("shard_grad_op", ALONE),
    "optimizer, full_shard": ("full_shard", ALONE),
    "both, full_shard": ("full_shard", BOTH),
}
CELLS = tuple((backend, place) for backend in BACKENDS for place in PLACES)


def offloaded(backend, place, precision="fp32", **sections):
    strategy, offload = PLACES[place]
    sharding = {"strategy": strategy} | sections.pop("sharding", {})
    return configured(backend, sharding, precision, offload=offload, **sections)


def played(scenario, cells, cell):
    """What both ranks returned in one cell; all cells are played in the same ranks."""
    return values(play(tuple((scenario, each) for each in cells))[scenario, cell])


# -- the user's optimizer --------------------------------------------------------------------------


class Remembering(torch.optim.SGD):
    """A user's own class: counts its steps, and says on which devices the tensors lie that it steps."""

    def __init__(self, params, lr):
        super().__init__(params, lr, momentum=0.9)
        self.steps = 0
        self.devices = set()

    def step(self, closure=None):
        self.steps += 1
        tensors = [
            tensor
            for group in self.param_groups
            for parameter in group["params"]
            for tensor in (parameter, parameter.grad)
        ]
        self.devices |= {(tensor.device.type, type(tensor)) for tensor in tensors if tensor is not None}
        return super().step(closure)


BUILT = {
    "own class": lambda params: Remembering(params, lr=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1),
    # Makes its state when it is built, from the parameters that it is given.
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, initial_accumulator_value=0.1),
    "groups": lambda params: torch.optim.AdamW(in_groups(params), lr=3e-3),
}


def in_groups(params):
    params = list(params)
    return [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2], "weight_decay": 0.0, "lr": 1e-2}]


def own(backend, place, name):
    kept = []

    def build(params):
        kept.append(BUILT[name](params))
        return kept[-1]

    with unishard.prepare(mlp(), offloaded(backend, place, optimizer=None), optimizer=build) as engine:
        found = curve(train(engine, own_share(MICRO_BATCHES)))
        inner = (
            engine._adapter.updates.optimizer
            if isinstance(engine._adapter.updates.optimizer, torch.optim.Optimizer)
            else engine._adapter.updates.optimizer.optimizer
        )
        inner = vars(inner).get("given", inner)  # one that counts its steps makes one for whole tensors
        state = [
            value
            for entry in inner.state.values()
            for value in entry.values()
            if torch.is_tensor(value) and value.dim()
        ]
        return {
            "curve": found,
            "the one that was built": inner is kept[-1],
            "type": type(inner).__name__,
            "steps": getattr(inner, "steps", None),
            "devices": getattr(inner, "devices", None),
            "state": {value.device.type for value in state},
        }


OWN = tuple(
    (*cell, name)
    for place, cell in enumerate(CELLS)
    for turn, name in enumerate(BUILT)
    if name == "own class" or turn == 1 + place % (len(BUILT) - 1)
)
"""The user's own class in every place, and another one in each."""


@pytest.mark.parametrize("cell", OWN, ids="-".join)
def test_the_users_optimizer_stays_the_users_optimizer(cell):
    found = played(own, OWN, cell)
    assert found[0]["curve"] == found[1]["curve"]
    wanted = oracle.train(mlp(), windows(), configured("fsdp", "full_shard", "fp32"), world=2, optimizer=BUILT[cell[2]])
    assert_conforms(found[0]["curve"], wanted, tolerance(cell[0], PLACES[cell[1]][0], "fp32"))
    for each in found:
        # DeepSpeed builds a torch Adagrad anew, from its defaults, since its state is made for the tensors it is built
        # from.
        assert each["the one that was built"] or cell[2] == "Adagrad"
        assert each["type"] == {"own class": "Remembering", "groups": "AdamW"}.get(cell[2], cell[2])
        assert each["state"] == {"cpu"}
        if cell[2] == "own class":
            assert each["steps"] == MICRO_BATCHES // ACCUMULATION
            assert {device for device, _ in each["devices"]} == {"cpu"}


def held(backend, place, precision):
    """Where the masters lie, and whether the tensors that step are others than the model's."""
    with unishard.prepare(mlp(), offloaded(backend, place, precision)) as engine:
        train(engine, own_share(ACCUMULATION))
        if backend == "deepspeed":
            masters = engine._adapter.zero.masters
            return {
                "masters": {(each.device.type, each.dtype) for each in masters},
                "numel": sum(each.numel() for each in masters),
            }
        stepped = engine._adapter.updates.optimizer_state.stepped
        return {
            "masters": {(each.device.type, each.dtype) for each in stepped.values()},
            "numel": sum(each.numel() for each in stepped.values()),
            "copies": not storages(engine.module.parameters()).keys() & storages(stepped.values()).keys(),
        }


HELD = tuple(
    (backend, place, PRECISIONS[(first + number) % 2])
    for first, backend in enumerate(BACKENDS)
    for number, place in enumerate(PLACES)
)
"""Every place of each backend in one precision, and in the other one on the other backend."""


@pytest.mark.parametrize("cell", HELD, ids="-".join)
def test_fp32_masters_are_stepped_in_host_memory_each_rank_its_part(cell):
    total = sum(parameter.numel() for parameter in mlp().parameters())
    found = played(held, HELD, cell)
    assert [each["masters"] for each in found] == [{("cpu", torch.float32)}] * 2
    assert total <= sum(each["numel"] for each in found) < 1.05 * total
    if cell[0] == "fsdp":
        assert [each["copies"] for each in found] == [cell[1] == "optimizer, full_shard"] * 2


# -- windows that are left out, parameters that are left out ---------------------------------------


def overflowing(backend, place, precision):
    """The second window has a gradient that is not a number, on one rank."""
    data = own_share(MICRO_BATCHES + ACCUMULATION)
    if my_rank() == 1:
        data[ACCUMULATION + 1] = data[ACCUMULATION + 1] | {"x": torch.full_like(data[ACCUMULATION + 1]["x"], math.nan)}
    with unishard.prepare(mlp(), offloaded(backend, place, precision)) as engine:
        done = train(engine, data)
        return [step.skipped for _, step in done if step.updated or step.skipped], curve(done)


@pytest.mark.parametrize("cell", HELD[1::2], ids="-".join)
def test_a_window_that_is_not_finite_leaves_host_and_device_alone(cell):
    found = played(overflowing, HELD[1::2], cell)
    assert found[0] == found[1]
    skipped, after = found[0]
    assert skipped == [False, True, *[False] * (MICRO_BATCHES // ACCUMULATION - 1)]
    starts = [start for start in range(0, MICRO_BATCHES + ACCUMULATION, ACCUMULATION) if start != ACCUMULATION]
    data = [everyones(start, start + ACCUMULATION, world=2) for start in starts]
    wanted = oracle.train(mlp(), data, configured("fsdp", "full_shard", cell[2]), world=2)
    assert_conforms(after, wanted, tolerance(cell[0], PLACES[cell[1]][0], cell[2]))


class Sometimes(nn.Module):
    """Its second branch is used only when told to, alone."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x, second):
        logits = self.parts[0](x) + (self.parts[1](x) if second else 0.0)
        return MlpOutput(logits.square().mean(), logits)


def unused(backend, place, precision):
    """How far plain SGD moves the second branch in an update that does not use it, after one that did."""
    torch.manual_seed(3)
    sgd = {"name": "sgd", "lr": 0.5, "weight_decay": 0.0}
    cfg = offloaded(backend, place, precision, optimizer=sgd)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(my_rank()))
    with unishard.prepare(Sometimes(), cfg) as engine:

        def branch():
            with torch.no_grad():
                return (engine(x, second=True).logits - engine(x, second=False).logits).float()

        def update(second):
            for _ in range(ACCUMULATION):
                engine.backward(engine(x, second=second).loss)
                engine.step()

        update(True)
        before = branch()
        update(False)
        return engine.mean((branch() - before).abs().max())


@pytest.mark.filterwarnings("ignore:.*trainable parameters got no gradient")
@pytest.mark.parametrize("cell", HELD[::2], ids="-".join)
def test_no_gradient_is_applied_a_second_time(cell):
    assert max(played(unused, HELD[::2], cell)) < (1e-6 if cell[2] == "fp32" else 2e-2)


# -- what cannot be had ----------------------------------------------------------------------------


def strictly(backend, params, optimizer):
    """What is only approximate is refused under strict."""
    unishard.prepare(
        mlp(),
        configured(backend, "full_shard", "fp32", offload={"params": params, "optimizer": optimizer}, strict=True),
    )


REFUSED = {
    (strictly, ("fsdp", "cpu", "none")): (
        "TranslationError: offload.params: 'cpu' is only approximate on fsdp, and strict is true: CPUOffloadPolicy "
        "moves parameters, gradients and optimizer state together, so the optimizer's state lives in host memory as "
        "well, and it steps there: more device memory is free, and the update is slower; the same maths"
    ),
}


@pytest.mark.parametrize("scenario", REFUSED, ids=lambda scenario: "-".join(scenario[1]))
def test_what_cannot_be_had_is_one_error_on_every_rank(scenario):
    assert error(play(tuple(REFUSED))[scenario]) == REFUSED[scenario]
