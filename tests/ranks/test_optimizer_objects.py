"""Optimizers, groups and schedulers as a user meets them on real ranks, beyond the curves of the conformance suite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import assert_conforms, in_ranks, play, values
from harness.training import BACKENDS, DEEP, FEWER, PAIRS, config, curve, everyones, own_share, train, update
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import unishard
from unishard.testing import oracle
from unishard.testing.conformance import TOLERANCES
from unishard.testing.models import MlpOutput, mlp

UPDATES = 4

# -- every optimizer of torch that works element by element, as an object with two groups ----------


def two_groups(kind: str, parameters: Any, **options: Any) -> torch.optim.Optimizer:
    every = list(parameters)
    groups = [{"params": every[:3], "lr": 0.02}, {"params": every[3:], "weight_decay": 0.0}]
    if kind == "Rprop":
        del groups[1]["weight_decay"]
    return getattr(torch.optim, kind)(groups, lr=0.01, **options)


OBJECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fused SGD": ("SGD", {"fused": True, "momentum": 0.9}),
    "fused Adagrad": ("Adagrad", {"fused": True}),
    "tensor rate": ("AdamW", {"lr": 0.01, "fused": True}),
    "maximize": ("Adam", {"maximize": True, "foreach": True}),
    "Adadelta": ("Adadelta", {}),
    "Adamax": ("Adamax", {}),
    "ASGD": ("ASGD", {}),
    "NAdam": ("NAdam", {}),
    "RAdam": ("RAdam", {}),
    "RMSprop": ("RMSprop", {"momentum": 0.9}),
    "Rprop": ("Rprop", {}),
}


def make(name, parameters):
    kind, options = OBJECTS[name]
    optimizer = two_groups(kind, parameters, **{key: value for key, value in options.items() if key != "lr"})
    if "lr" in options:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"])
    return optimizer


def with_object(backend, strategy, name, **sections):
    model = mlp()
    with unishard.prepare(
        model, config(backend, strategy, optimizer=None, **sections), make(name, model.parameters())
    ) as engine:
        return curve(train(engine, own_share(UPDATES)))


def plain(name):
    windows = [everyones(index, index + 1, world=2) for index in range(UPDATES)]
    return oracle.train(
        mlp(), windows, config("fsdp", optimizer=None), world=2, optimizer=lambda params: make(name, params)
    )


IN_TURN = tuple(
    (backend, name)
    for turn, backend in enumerate(BACKENDS)
    for number, name in enumerate(OBJECTS)
    if DEEP or (turn + number) % 2
)
PLAYED = tuple((with_object, (backend, "full_shard", name)) for backend, name in IN_TURN)


@pytest.mark.parametrize(("backend", "name"), IN_TURN)
def test_an_object_is_moved_to_the_shards_with_its_groups_and_options(backend, name):
    wanted = values(play(tuple((plain, (name,)) for name in OBJECTS), 1)[plain, (name,)])[0]
    found = values(play(PLAYED)[with_object, (backend, "full_shard", name)])
    assert found[0] == found[1]
    assert_conforms(found[0], wanted, TOLERANCES["fp32"])


# -- what the user holds, and what is live ---------------------------------------------------------


CELLS = PAIRS


@in_ranks(cells=FEWER)
def test_the_schedule_multiplies_the_rate_of_each_group(backend, strategy):
    """Of every group over three updates, from the config."""
    groups = {"no_decay": ["bias"], "groups": [{"params": ["^head"], "lr": 0.5}]}
    optimizer = {"name": "sgd", "lr": 1.0, "weight_decay": 0.1} | groups
    cfg = config(backend, strategy, optimizer=optimizer, scheduler={"name": "linear", "total_steps": 4})
    with unishard.prepare(mlp(), cfg) as engine:
        rates = []
        for batch in engine.batches(own_share(3)):
            engine.backward(engine(**batch).loss)
            rates.append([group["lr"] for group in engine.optimizer.param_groups])
            assert engine.step().lr == rates[-1][0]
        decays = [group["weight_decay"] for group in engine.optimizer.param_groups]
    assert rates == [[1.0, 1.0, 0.5, 0.5], [0.75, 0.75, 0.375, 0.375], [0.5, 0.5, 0.25, 0.25]]
    assert decays == [0.1, 0.0, 0.1, 0.0]


@in_ranks(cells=CELLS)
def test_the_groups_that_the_user_holds_are_the_live_ones(backend, strategy):
    """A rate that is set there by hand counts."""
    model = mlp()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    held = own.param_groups[0]
    with unishard.prepare(model, config(backend, strategy, optimizer=None), own) as engine:
        held["lr"] = 0.0
        before = engine(**own_share(1)[0]).loss.item()
        ((_, step),) = train(engine, own_share(1))
        after = engine(**own_share(1)[0]).loss.item()
        live = engine.optimizer.param_groups[0]
    assert live is held
    assert (step.lr, after) == (0.0, before)


@in_ranks(cells=FEWER)
def test_an_object_may_hold_frozen_parameters(backend, strategy):
    """`AdamW(model.parameters())` with a frozen layer, as everyone writes it."""
    model = mlp()
    model.inp.requires_grad_(False)
    adamw = torch.optim.AdamW(model.parameters())
    with unishard.prepare(model, config(backend, strategy, optimizer=None), adamw) as engine:
        updated = [step.updated for _, step in train(engine, own_share(2))]
    assert updated == [True, True]


class Scaled(nn.Module):
    """Gradients are zero, so only weight decay moves anything."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((5, 3), 2.0))
        self.bias = nn.Parameter(torch.full((7,), 4.0))

    def forward(self, x):
        total = self.weight.sum() + self.bias.sum()
        return MlpOutput(total * 0.0 + x.sum() * 0.0, torch.stack([self.weight.mean(), self.bias.mean()]))


@in_ranks(cells=tuple((*pair, name) for pair in FEWER for name in ("adamw", "lion", "sgd")), in_turn=True)
def test_without_gradients_only_what_decays_moves(backend, strategy, name):
    optimizer = {"name": name, "lr": 0.5, "weight_decay": 0.5, "no_decay": ["bias"]}
    with unishard.prepare(Scaled(), config(backend, strategy, optimizer=optimizer)) as engine:
        update(engine, {"x": torch.ones(1)})
        weight, bias = engine(torch.ones(1)).logits.tolist()
    assert weight == pytest.approx(1.5, rel=1e-6)
    assert bias == 4.0


# -- schedulers ------------------------------------------------------------------------------------


def rates_with_a_skipped_update(backend, strategy, given):
    """Rates of six updates, of which the third has an infinite gradient on rank 0."""
    model = mlp()
    own = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = (
        LambdaLR(own, lambda update: 1 - update / 10)
        if given == "object"
        else lambda built: LambdaLR(built, lambda i: 1 - i / 10)
    )
    optimizer = own if given == "object" else lambda params: torch.optim.SGD(params, lr=1.0)
    cfg = config(
        backend, strategy, optimizer=None, training={"gradient_accumulation_steps": 2, "gradient_clipping": 1e-3}
    )
    steps = []
    with unishard.prepare(model, cfg, optimizer, scheduler) as engine:
        rank = unishard.Topology.from_environment().rank
        for index, batch in enumerate(engine.batches(own_share(12))):
            loss = engine(**batch).loss
            engine.backward(loss * (math.inf if (index, rank) == (4, 0) else 1.0))
            step = engine.step()
            if step.updated or step.skipped:
                steps.append((step.updated, round(step.lr, 12)))
        return steps, round(engine.lr, 12)


def momentum_cycles(backend):
    """OneCycleLR writes the momentum as well as the rate."""
    model = mlp()
    own = two_groups("SGD", model.parameters(), momentum=0.9)
    scheduler = OneCycleLR(own, max_lr=[0.1, 0.05], total_steps=10)
    cfg = config(backend, "shard_optimizer", optimizer=None)
    with unishard.prepare(model, cfg, own, scheduler) as engine:
        return curve(train(engine, own_share(UPDATES)))


def momentum_cycles_in_plain_torch():
    model = mlp()
    own = two_groups("SGD", model.parameters(), momentum=0.9)
    scheduler = OneCycleLR(own, max_lr=[0.1, 0.05], total_steps=10)
    losses, norms, lrs = [], [], []
    for index in range(UPDATES):
        window = everyones(index, index + 1, world=2)
        own.zero_grad()
        loss = model(**{name: torch.cat([batch[name] for batch in window]) for name in window[0]}).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item())
        lrs.append(own.param_groups[0]["lr"])
        own.step()
        scheduler.step()
    return oracle.Curve(tuple(losses), tuple(norms), tuple(lrs))


SKIPPED = tuple(
    (backend, strategy, given)
    for strategy, given in (("no_shard", "object"), ("shard_grad_op", "function"), ("full_shard", "object"))
    for backend in BACKENDS
)
SKIPPED_AT = dict.fromkeys((1, 2, 4), SKIPPED) if DEEP else {2: (SKIPPED[0], *SKIPPED[3:5]), 4: SKIPPED[5:]}
"""By number of ranks."""


@pytest.mark.parametrize(("world", "cell"), [(world, cell) for world, cells in SKIPPED_AT.items() for cell in cells])
def test_a_scheduler_steps_once_for_each_real_update_on_any_number_of_ranks(world, cell):
    rates = [(True, 1.0), (True, 0.9), (False, 0.8), (True, 0.8), (True, 0.7), (True, 0.6)]
    scenarios = tuple((rates_with_a_skipped_update, each) for each in SKIPPED_AT[world])
    assert values(play(scenarios, world)[rates_with_a_skipped_update, cell]) == [(rates, 0.5)] * world


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scheduler_may_write_more_than_the_rate(backend):
    wanted = values(play(((momentum_cycles_in_plain_torch, ()),), 1)[momentum_cycles_in_plain_torch, ()])[0]
    cells = tuple((momentum_cycles, (each,)) for each in BACKENDS)
    for found in values(play(cells)[momentum_cycles, (backend,)]):
        assert_conforms(found, wanted, TOLERANCES["fp32"])


# -- where parameters live elsewhere ---------------------------------------------------------------


def elsewhere(backend, where):
    settings = {
        "offload": ("full_shard", {"offload": "cpu"}),
        "offload below stage 3": ("shard_grad_op", {"offload": {"optimizer": "cpu"}}),
    }
    strategy, sections = settings[where]
    model = mlp()
    cfg = config(backend, strategy, optimizer=None, **sections)
    with unishard.prepare(model, cfg, with_eager_state(model.parameters())) as engine:
        return curve(train(engine, own_share(UPDATES)))


def with_eager_state(parameters):
    return two_groups("Adagrad", parameters, initial_accumulator_value=0.1, lr_decay=0.1)


def eager_in_plain_torch():
    windows = [everyones(index, index + 1, world=2) for index in range(UPDATES)]
    return oracle.train(mlp(), windows, config("fsdp", optimizer=None), world=2, optimizer=with_eager_state)


ELSEWHERE = (
    ("fsdp", "offload"),
    ("deepspeed", "offload"),
    ("fsdp", "offload below stage 3"),
    ("deepspeed", "offload below stage 3"),
)


@pytest.mark.parametrize("cell", ELSEWHERE, ids="-".join)
def test_groups_and_the_state_of_adagrad_hold_where_the_optimizer_lives_elsewhere(cell):
    wanted = values(play(((eager_in_plain_torch, ()),), 1)[eager_in_plain_torch, ()])[0]
    for found in values(play(tuple((elsewhere, each) for each in ELSEWHERE))[elsewhere, cell]):
        assert_conforms(found, wanted, TOLERANCES["fp32"])


# -- whole tensors ---------------------------------------------------------------------------------


def muon(backend, strategy, precision):
    """torch's Muon, which takes matrices only."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 3, bias=False))
    with unishard.prepare(
        model, config(backend, strategy, precision=precision, optimizer=None), lambda params: torch.optim.Muon(params)
    ) as engine:
        losses = []
        for _ in range(3):
            loss = engine(torch.ones(2, 4)).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses


def muon_in_plain_torch():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 3, bias=False))
    optimizer = torch.optim.Muon(model.parameters())
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


WHOLE = (
    *((muon, (backend, "no_shard", precision)) for backend in BACKENDS for precision in ("fp32", "bf16")),
    *((muon, (backend, "full_shard", "fp32")) for backend in BACKENDS),
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_torchs_muon_makes_its_updates_from_whole_matrices(backend):
    wanted = muon_in_plain_torch()
    for strategy in ("no_shard", "full_shard"):
        assert values(play(WHOLE)[muon, (backend, strategy, "fp32")])[0] == pytest.approx(wanted, rel=1e-6)
    assert values(play(WHOLE)[muon, (backend, "no_shard", "bf16")])[0] == pytest.approx(wanted, rel=2e-2)
    assert wanted[2] < wanted[0] * 0.99
