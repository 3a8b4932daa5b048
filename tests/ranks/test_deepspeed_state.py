"""The training state of a DeepSpeed engine in parts: read after some updates and written into a fresh engine, it trains
on bit by bit."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_optimizer_state
from harness import config, error, own_share, play, values
from torch import nn
from torch.nn import functional

import unishard
from unishard.contract.optimizer_state import StateSpec
from unishard.testing.models import MlpOutput, mlp
from unishard_deepspeed.private.master_weights import master_tensors

ADAMW = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1}
BEFORE, AFTER = 3, 3
"""Updates, and those that follow."""


class Tower(nn.Module):
    """Never used."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(13, 5)


class Model(nn.Module):
    """A weight that stays frozen, a bias that is frozen midway, a tower that nobody uses, and a parameter of one
    element."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.inp = nn.Linear(13, 13)
        self.inp.weight.requires_grad_(False)
        self.late = nn.Linear(13, 7)
        self.tower = Tower()
        self.gain = nn.Parameter(torch.full((1,), 1.0 + seed / 10))
        self.out = nn.Linear(7, 11)

    def forward(self, x, labels):
        logits = self.out(functional.gelu(self.late(self.inp(x)))) * self.gain
        return MlpOutput(functional.cross_entropy(logits.float(), labels), logits)


def in_groups(params):
    """Two groups; SGD with momentum, which keeps no number."""
    params = list(params)
    return torch.optim.SGD(
        [{"params": params[::2], "lr": 0.1}, {"params": params[1::2], "weight_decay": 0.1}], lr=0.05, momentum=0.9
    )


def counting(params):
    return Counting(list(params), {"lr": 0.05})


def adagrad(params):
    return torch.optim.Adagrad(params, lr=0.05, initial_accumulator_value=0.1)


class Counting(torch.optim.Optimizer):
    """A user's own, which counts in an int."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["updates"] = state.get("updates", 0) + 1
                    parameter.sub_(parameter.grad, alpha=group["lr"] / state["updates"])


OFFLOAD = {"offload": {"optimizer": "cpu"}}
SECTIONS = {
    "plain": {},
    "fp16": {"precision": {"compute": "fp16", "loss_scale": 64.0}},
    "bf16 optimizer": {"precision": {"compute": "bf16", "accumulate": "fp32"}},
    "bf16 masters": {"precision": {"compute": "bf16", "master": "bf16"}},
    "offloaded": OFFLOAD,
    "all offloaded": {"offload": {"optimizer": "cpu", "params": "cpu"}},
    "persistent": {"native": {"deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 50}}}},
    "sub-groups": {"native": {"deepspeed": {"zero_optimization": {"sub_group_size": 100}}}},
}
OPTIMIZERS = {"groups": in_groups, "counting": counting, "adagrad": adagrad}


def prepared(seed, strategy, precision, variety):
    optimizer = OPTIMIZERS.get(variety)
    sections = {
        "precision": precision,
        "optimizer": None if optimizer else ADAMW,
        "scheduler": None,
        **SECTIONS.get(variety, {}),
    }
    sharding = {"strategy": strategy, "conditional_modules": ["Tower"]} | (
        {"group_size": 2} if strategy.startswith("hybrid") else {}
    )
    cfg = config(
        "deepspeed",
        sharding,
        **{key: section for key, section in sections.items() if section is not None or key == "optimizer"},
    )
    return unishard.prepare(Model(seed), cfg, optimizer=optimizer) if optimizer else unishard.prepare(Model(seed), cfg)


def train(engine, first, last):
    """This rank's own losses."""
    losses = []
    for micro_batch in own_share(last)[first:]:
        loss = engine(**micro_batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def parts_of(engine):
    """Copies of everything that this rank holds: of the masters, and of the optimizer's state by its keys."""
    engine._adapter.reshard_all()
    masters, state = {}, {}
    for name, parameter in engine.module.named_parameters():
        masters[name] = copied(engine._adapter.master_shard(parameter))
        state[name] = {key: copied(part) for key, part in engine._adapter.optimizer_state.shards(parameter).items()}
    return masters, state


def copied(part):
    return part._replace(values=part.values.detach().cpu().clone())


def comparable(parts):
    masters, state = parts
    flat = {name: (part.start, part.values) for name, part in masters.items()}
    flat |= {f"{name}.{key}": (part.start, part.values) for name, parts in state.items() for key, part in parts.items()}
    return {
        name: (start, list(value.shape), value.dtype, value.double().flatten().tolist())
        for name, (start, value) in flat.items()
    }


NUMBERS = ("step", "updates")


def specs_of(engine, state):
    """What all ranks together have found, as a checkpoint would say it."""
    found = {
        name: StateSpec(
            {key: part.values.dtype for key, part in parts.items() if key not in NUMBERS},
            {key: part.values.item() for key, part in parts.items() if key in NUMBERS},
        )
        for name, parts in state.items()
        if parts
    }
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, found)
    together = {}
    for each in everyones:
        for name, spec in each.items():
            assert together.setdefault(name, spec) == spec, name
    return {engine.module.get_parameter(name): spec for name, spec in together.items()}


def load(engine, parts, specs):
    masters, state = parts
    engine._adapter.reshard_all()
    engine._adapter.optimizer_state.make(specs)
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            engine._adapter.master_shard(parameter).values.copy_(masters[name].values)
            held = engine._adapter.optimizer_state.shards(parameter)
            assert held.keys() == state[name].keys()
            for key, part in held.items():
                if key in NUMBERS:
                    assert part.values == state[name][key].values
                else:
                    assert not part.values.any()
                    part.values.copy_(state[name][key].values)
    engine._adapter.loaded()
    engine._order.writes += 1  # as a load counts what it writes


def holes(engine, specs):
    """Elements that not exactly one rank of a group holds, of masters and of the optimizer's state."""
    wrong = []
    for name, parameter in engine.module.named_parameters():
        master = engine._adapter.master_shard(parameter)
        keys = specs[parameter].tensors if parameter in specs else ()
        held = {"master": master} | {
            key: part for key, part in engine._adapter.optimizer_state.shards(parameter).items() if key in keys
        }
        for key in ("master", *keys):
            if master.group is None:
                wrong += [f"{name}.{key}"] * (key not in held or held[key].values.shape != master.shape)
                continue
            count = torch.zeros(master.shape.numel())
            if key in held:
                count[held[key].start : held[key].start + held[key].values.numel()] += 1
            dist.all_reduce(count, group=master.group)
            wrong += [f"{name}.{key}"] * bool((count != 1).any())
    return wrong


def begin(engine):
    """The first updates, one of them without a bias."""
    train(engine, 0, BEFORE - 1)
    engine.weights.set_trainable("late.bias", False)
    train(engine, BEFORE - 1, BEFORE)


def resumed(strategy, precision, variety):
    """Losses after the first updates and the state at the end: never interrupted, after it was read, and on a fresh
    engine."""
    with prepared(3, strategy, precision, variety) as engine:
        begin(engine)
        uninterrupted = train(engine, BEFORE, BEFORE + AFTER)
    with prepared(3, strategy, precision, variety) as engine:
        kind = type(engine._adapter.optimizer).__name__
        begin(engine)
        parts = parts_of(engine)
        specs = specs_of(engine, parts[1])
        by_name = {name: specs[parameter] for name, parameter in engine.module.named_parameters() if parameter in specs}
        wrong = holes(engine, specs)
        read = train(engine, BEFORE, BEFORE + AFTER)
        wanted = comparable(parts_of(engine))
    with prepared(4, strategy, precision, variety) as engine:
        engine.weights.set_trainable("late.bias", False)
        load(engine, parts, named(engine, by_name))
        loaded = comparable(parts_of(engine))
        fresh = train(engine, BEFORE, BEFORE + AFTER)
        found = comparable(parts_of(engine))
    return {
        "kind": kind,
        "numbers": {name: dict(spec.numbers) for name, spec in by_name.items()},
        "tensors": {name: sorted(spec.tensors) for name, spec in by_name.items()},
        "holes": wrong,
        "losses": (uninterrupted, read, fresh),
        "loaded": loaded == comparable(parts),
        "different": [name for name in wanted.keys() | found.keys() if found.get(name) != wanted.get(name)],
    }


def named(engine, specs):
    return {parameter: specs[name] for name, parameter in engine.module.named_parameters() if name in specs}


STRATEGIES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
CELLS = (
    *((strategy, precision, "plain") for strategy in STRATEGIES for precision in ("fp32", "bf16")),
    *((strategy, "fp16", "fp16") for strategy in ("no_shard", "shard_grad_op", "full_shard")),
    *((strategy, "bf16", "offloaded") for strategy in STRATEGIES[1:]),
    *((strategy, "fp32", "groups") for strategy in STRATEGIES),
    *((strategy, "fp32", variety) for strategy in ("no_shard", "full_shard") for variety in ("counting", "adagrad")),
    ("shard_optimizer", "bf16", "bf16 optimizer"),
    ("shard_grad_op", "bf16", "bf16 masters"),
    ("full_shard", "bf16", "all offloaded"),
    ("full_shard", "fp32", "all offloaded"),
    ("full_shard", "bf16", "persistent"),
    ("full_shard", "fp32", "sub-groups"),
)
HYBRID = tuple((strategy, "bf16", "plain") for strategy in ("hybrid_shard", "hybrid_shard_grad_op"))


def assert_resumed(found, variety):
    for each in found:
        assert each["holes"] == []
        uninterrupted, read, fresh = each["losses"]
        assert len(set(read)) == AFTER
        assert all(map(math.isfinite, read))
        assert read == uninterrupted
        assert each["loaded"]
        assert fresh == read
        assert each["different"] == []
        trained = {name: numbers for name, numbers in each["numbers"].items() if not name.startswith("tower.")}
        assert trained.keys() == {"inp.bias", "late.weight", "late.bias", "gain", "out.weight", "out.bias"}
        if variety != "adagrad":  # which may have state from its construction on
            assert each["numbers"] == trained
        if variety == "groups":
            assert set(map(tuple, each["tensors"].values())) == {("momentum_buffer",)}
            assert not any(each["numbers"].values())
        else:
            steps = {name: tuple(numbers.values()) for name, numbers in trained.items()}
            assert steps == {name: (BEFORE - (name == "late.bias"),) for name in steps}


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_a_fresh_engine_with_the_state_of_another_trains_on_as_that_one(cell):
    found = values(play(tuple((resumed, each) for each in CELLS))[resumed, cell])
    if cell[2] == "bf16 optimizer":
        assert {each["kind"] for each in found} == {"BF16_Optimizer"}
    assert_resumed(found, cell[2])


@pytest.mark.parametrize("cell", HYBRID, ids="-".join)
def test_each_group_of_a_hybrid_strategy_holds_all_of_it(cell):
    assert_resumed(values(play(tuple((resumed, each) for each in HYBRID), 4)[resumed, cell]), cell[2])


# -- what agrees stays whole -----------------------------------------------------------------------


def whole(strategy, precision):
    """A model that is trained as a whole, written into an engine whose masters were in pieces; what DeepSpeed then
    finds of it."""
    with unishard.prepare(mlp(3), config("deepspeed", strategy, precision=precision, optimizer=ADAMW)) as engine:
        train(engine, 0, BEFORE)
        parts = parts_of(engine)
        specs = specs_of(engine, parts[1])
        by_name = {name: specs[parameter] for name, parameter in engine.module.named_parameters()}
        read = train(engine, BEFORE, BEFORE + AFTER)
    with unishard.prepare(mlp(4), config("deepspeed", strategy, precision=precision, optimizer=ADAMW)) as engine:
        engine.weights.set_trainable("head", False)
        train(engine, 7, 8)  # what it has of its own is forgotten
        engine.weights.set_trainable("head", True)
        load(engine, parts, named(engine, by_name))
        inner = engine._adapter._inner.optimizer
        entries = sum(bool(state) for state in inner.state.values())
        steps = [state["step"] for state in inner.state.values()]
        moments = {}
        for name, parameter in engine.module.named_parameters():
            moment = safe_get_full_optimizer_state(parameter, "exp_avg")
            part = engine._adapter.optimizer_state.shards(parameter).get("exp_avg")
            if moment is not None and part is not None:  # not at stage 0, and not where the others hold all of it
                stretch = moment.flatten()[part.start : part.start + part.values.numel()]
                moments[name] = torch.equal(stretch, part.values.to(engine.device))
        return {
            "entries": entries,
            "masters": len(master_tensors(engine._adapter.optimizer, engine._adapter._inner, engine._adapter._kind)),
            "shared": len(steps) - len({step.data_ptr() for step in steps}),
            "moments": moments,
            "losses": (read, train(engine, BEFORE, BEFORE + AFTER)),
        }


WHOLE = tuple((strategy, precision) for strategy in STRATEGIES for precision in ("fp32", "bf16"))


@pytest.mark.parametrize("cell", WHOLE, ids="-".join)
def test_masters_whose_parameters_agree_move_as_a_whole_again(cell):
    for found in values(play(tuple((whole, each) for each in WHOLE))[whole, cell]):
        assert found["entries"] == found["masters"]
        assert found["shared"] == 0
        assert bool(found["moments"]) == (cell[0] != "no_shard")
        assert all(found["moments"].values())
        assert found["losses"][1] == found["losses"][0]


# -- what is refused -------------------------------------------------------------------------------


def in_files():
    """An engine whose parameters lie in files cannot be built without DeepSpeed's op for it; this one only says so of
    itself."""
    with unishard.prepare(mlp(), config("deepspeed")) as engine:
        engine._adapter._in_files = True
        engine._adapter.reshard_all()


def test_parameters_in_files_are_refused():
    assert error(play(((in_files, ()),))[in_files, ()]).startswith(
        "CheckpointError: offload.params: nvme keeps parameters in files, of which DeepSpeed 0.19.8 cannot read or "
        "write shards"
    )
