"""Hybrid strategies on 2 x 2 ranks: what each rank holds, what travels inside and between groups, and that it trains
the same."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from harness import assert_conforms, curve, my_rank, own_share, play, train, values
from harness.training import ACCUMULATION, BACKENDS, DEEP, MICRO_BATCHES, configured, everyones
from test_options import routing
from torch.distributed.tensor import DTensor

import unishard
from dev.ranks.recording import BLOCK, PARAMETERS, Countable, Recorder
from unishard.testing import oracle
from unishard.testing.conformance import TOLERANCES
from unishard.testing.models import batch, mlp

HYBRID = ("hybrid_shard", "hybrid_shard_grad_op")
CELLS = tuple((backend, strategy) for backend in BACKENDS for strategy in HYBRID)
WORLD, GROUP = 4, 2
ADAMW = {"optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.1}}


def played(scenario, cells, cell):
    """What the four ranks returned in one cell; all cells are played in the same ranks."""
    return values(play(tuple((scenario, each) for each in cells), WORLD)[scenario, cell])


def hybrid(backend, strategy, precision="fp32", **sections):
    sharding = {"strategy": strategy, "group_size": GROUP} | sections.pop("sharding", {})
    return configured(backend, sharding, precision, **sections)


def windows(model="mlp"):
    return [
        everyones(start, start + ACCUMULATION, world=WORLD, model=model)
        for start in range(0, MICRO_BATCHES, ACCUMULATION)
    ]


# -- the maths -------------------------------------------------------------------------------------


SPANNING = tuple((*cell, ("fp32", "bf16")[turn in (1, 2)]) for turn, cell in enumerate(CELLS))
"""Every strategy of each backend in one precision, and in the other one on the other backend."""
FEWER = CELLS if DEEP else (CELLS[0], CELLS[3])
FEWER_SPANNING = SPANNING if DEEP else SPANNING[1:3]
"""Each engine and each strategy."""


# -- memory ----------------------------------------------------------------------------------------


def held(backend, strategy):
    """Elements of each kind on this rank after an update, and the masters themselves."""
    with unishard.prepare(Countable(), hybrid(backend, strategy, sharding={"units": ["Block"]}, **ADAMW)) as engine:
        for _ in range(ACCUMULATION):
            engine.backward(engine(torch.randn(2, 4), torch.arange(2)).loss)
            engine.step()
        placement, optimizer = engine.weights.placement(), getattr(engine.optimizer, "optimizer", engine.optimizer)
        masters = [part(tensor) for tensor in MASTERS[backend](engine)]
        state = [
            value
            for entry in optimizer.state.values()
            for value in entry.values()
            if torch.is_tensor(value) and value.dim()
        ]
        return {
            "masters": placement.master_numel,
            "parameters": placement.param_bytes // 4,
            "state": sum(part(value).numel() for value in state),
            "values": torch.cat([tensor.detach().reshape(-1) for tensor in masters]).tolist(),
        }


MASTERS = {
    "fsdp": lambda engine: engine.module.parameters(),
    "deepspeed": lambda engine: engine._adapter.zero.masters,
}


def part(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


TABLE = {
    ("fsdp", "hybrid_shard"): {"masters": PARAMETERS // GROUP, "parameters": PARAMETERS // GROUP, "state": PARAMETERS},
    # Between steps also the parameters are in parts.
    ("fsdp", "hybrid_shard_grad_op"): {
        "masters": PARAMETERS // GROUP,
        "parameters": PARAMETERS // GROUP,
        "state": PARAMETERS,
    },
    ("deepspeed", "hybrid_shard"): {
        "masters": PARAMETERS // GROUP,
        "parameters": PARAMETERS // GROUP,
        "state": PARAMETERS,
    },
    ("deepspeed", "hybrid_shard_grad_op"): {
        "masters": PARAMETERS // GROUP,
        "parameters": PARAMETERS,
        "state": PARAMETERS,
    },
}


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_each_rank_holds_what_the_table_says(cell):
    for found in played(held, CELLS, cell):
        assert {name: found[name] for name in TABLE[cell]} == TABLE[cell]


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_ranks_in_a_row_form_a_group_and_groups_hold_the_same(cell):
    zero, one, two, three = (found["values"] for found in played(held, CELLS, cell))
    assert (zero, one) == (two, three)
    assert zero != one


# -- collectives -----------------------------------------------------------------------------------


FLAGS = "uint8"
"""In which ranks on DeepSpeed ask each other which parameters a window used."""


class AxisRecorder(Recorder):
    """Notes also between how many ranks a collective goes: those of a group are neighbors."""

    def __init__(self):
        super().__init__()
        self.moved = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        count = len(self.events)
        done = super().__torch_dispatch__(func, types, args, kwargs)
        for event in self.events[count:]:
            if event.numel and event.dtype != FLAGS:
                ranks = next(
                    dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg))
                    for arg in args
                    if isinstance(arg, torch.ScriptObject)
                )
                axis = {(0, 1): "shard", (2, 3): "shard", (0, 2): "replicate", (1, 3): "replicate"}.get(
                    tuple(ranks), "all"
                )
                self.moved.setdefault(event.phase, Counter())[event.kind, axis] += event.numel
        return done


def axes(backend, strategy):
    """Elements of the third window by phase, kind and axis."""
    torch.manual_seed(0)
    cfg = hybrid(backend, strategy, sharding={"units": ["Block"]}, **NO_PREFETCH[strategy])
    with unishard.prepare(Countable(), cfg) as engine:
        for _ in range(3):
            recorder = AxisRecorder()
            with recorder:
                for turn in range(ACCUMULATION):
                    recorder.phase = f"forward {turn}"
                    loss = engine(torch.randn(2, 4), torch.arange(2)).loss
                    recorder.phase = f"backward {turn}"
                    engine.backward(loss)
                    recorder.phase = f"step {turn}"
                    engine.step()
        return {phase: dict(kinds) for phase, kinds in recorder.moved.items()}


NO_PREFETCH = {"hybrid_shard": {"communication": {"prefetch_bucket_size": 0}}, "hybrid_shard_grad_op": {}}
P = PARAMETERS
GATHER, SCATTER, REDUCE = {("all_gather", "shard"): P}, {("reduce_scatter", "shard"): P}, {("all_reduce", "shard"): P}
BETWEEN = {("all_reduce", "replicate"): P // GROUP}
AGAIN = {("all_gather", "shard"): 3 * BLOCK} | SCATTER
NORMS = {"fsdp": {("all_reduce", "all"): 1}, "deepspeed": {("all_reduce", "shard"): 1}}
MOVED = {
    ("fsdp", "hybrid_shard"): {
        "forward 0": GATHER,
        "backward 0": AGAIN,
        "forward 1": GATHER,
        "backward 1": AGAIN | BETWEEN,
        "step 1": NORMS["fsdp"],
    },
    ("fsdp", "hybrid_shard_grad_op"): {
        "forward 0": GATHER,
        "backward 0": SCATTER,
        "backward 1": SCATTER | BETWEEN,
        "step 1": NORMS["fsdp"],
    },
    ("deepspeed", "hybrid_shard"): {
        "forward 0": GATHER,
        "backward 0": GATHER | SCATTER,
        "forward 1": GATHER,
        "backward 1": GATHER | SCATTER,
        # Of the norm one number between the groups.
        "step 1": NORMS["deepspeed"] | {("all_reduce", "replicate"): P // GROUP + 1},
    },
    ("deepspeed", "hybrid_shard_grad_op"): {
        "backward 0": REDUCE,
        "backward 1": REDUCE,
        "step 1": GATHER | NORMS["deepspeed"] | {("all_reduce", "replicate"): P // GROUP + 1},
    },
}


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_parts_of_the_gradients_travel_between_groups_once_a_window_and_nothing_else(cell):
    for moved in played(axes, CELLS, cell):
        assert moved == MOVED[cell]


# -- what is not the same on all ranks -------------------------------------------------------------


def overflowing(backend, strategy, precision):
    """The first window has an infinite gradient on the last rank, in its first micro-batch."""
    data = own_share(MICRO_BATCHES + ACCUMULATION)
    with unishard.prepare(mlp(), hybrid(backend, strategy, precision)) as engine:
        if my_rank() == WORLD - 1:
            data[0] = data[0] | {"x": torch.full_like(data[0]["x"], math.inf)}
        done = train(engine, data)
        return [step.skipped for _, step in done if step.updated or step.skipped], curve(done[ACCUMULATION:])


@pytest.mark.parametrize("cell", FEWER_SPANNING, ids="-".join)
def test_an_infinite_gradient_in_one_group_leaves_out_the_update_in_all(cell):
    found = played(overflowing, FEWER_SPANNING, cell)
    assert found.count(found[0]) == WORLD
    skipped, after = found[0]
    assert skipped == [True, *[False] * (MICRO_BATCHES // ACCUMULATION)]
    starts = range(ACCUMULATION, MICRO_BATCHES + ACCUMULATION, ACCUMULATION)
    data = [everyones(start, start + ACCUMULATION, world=WORLD) for start in starts]
    wanted = oracle.train(mlp(), data, configured("fsdp", "full_shard", cell[2]), world=WORLD)
    assert_conforms(after, wanted, TOLERANCES[cell[2]])


ROUTED = {
    "other parameters in each micro-batch": lambda turn, rank: turn % 2 == 0,
    "late": lambda turn, rank: turn % 2 == 1,
    "in one group": lambda turn, rank: rank < GROUP and turn in (1, 2, 4),
}
ROUTES = tuple(
    (*cell, routed)
    for place, cell in enumerate(SPANNING)
    for number, routed in enumerate(ROUTED)
    if (cell[0] == "deepspeed" or routed != "in one group") and (DEEP or (place + number) % 2)
) + tuple(("fsdp", strategy, "fp32", "in one group") for strategy in HYBRID[: 1 + DEEP])


def routed_batch(turn, rank, routed):
    return batch("mlp", (WORLD * turn + rank) * 2, 2) | {"routed": torch.full((2,), ROUTED[routed](turn, rank))}


def routes(backend, strategy, precision, routed):
    native = {"reduce_scatter_unused_params": True} if routed == "in one group" else {}
    cfg = hybrid(backend, strategy, precision, sharding={"units": ["Part"]}, native={"fsdp": native})
    with unishard.prepare(routing(), cfg) as engine:
        return curve(train(engine, [routed_batch(turn, my_rank(), routed) for turn in range(MICRO_BATCHES)]))


@pytest.mark.parametrize("cell", ROUTES, ids="-".join)
def test_parameters_that_are_not_always_used_train_as_in_plain_torch(cell):
    found = played(routes, ROUTES, cell)
    assert found.count(found[0]) == WORLD
    data = [
        [routed_batch(turn, rank, cell[3]) for turn in range(start, start + ACCUMULATION) for rank in range(WORLD)]
        for start in range(0, MICRO_BATCHES, ACCUMULATION)
    ]
    wanted = oracle.train(routing(), data, configured("fsdp", "full_shard", cell[2]), world=WORLD)
    assert_conforms(found[0], wanted, TOLERANCES[cell[2]])


# -- beside other engines --------------------------------------------------------------------------


def beside(backend, strategy):
    """A hybrid engine and one without groups take turns; the second is built while the first is there."""
    first = unishard.prepare(mlp(), hybrid(backend, strategy))
    second = unishard.prepare(mlp(), configured(backend, "full_shard"))
    sizes = [engine.weights.placement().master_numel for engine in (first, second)]
    done = [[], []]
    for micro_batch in own_share(MICRO_BATCHES):
        for engine, curve_of in zip((first, second), done, strict=True):
            loss = engine(**micro_batch).loss
            engine.backward(loss)
            curve_of.append((engine.mean(loss), engine.step()))
    first.close()
    second.close()
    return sizes, [curve(one) for one in done]


@pytest.mark.parametrize("cell", FEWER, ids="-".join)
def test_groups_are_those_of_one_engine_alone(cell):
    wanted = oracle.train(mlp(), windows(), configured("fsdp", "full_shard"), world=WORLD)
    for (hybrid_size, plain_size), curves in played(beside, FEWER, cell):
        assert hybrid_size > 1.5 * plain_size
        for found in curves:
            assert_conforms(found, wanted, TOLERANCES["fp32"])


def one_group(backend, strategy):
    """All ranks are one node, so that left out, a group is all of them."""
    with unishard.prepare(mlp(), configured(backend, strategy)) as engine:
        return engine.weights.placement(), curve(train(engine, own_share(MICRO_BATCHES)))


@pytest.mark.parametrize("cell", FEWER, ids="-".join)
def test_where_one_group_holds_all_ranks_nothing_is_replicated(cell):
    pairs = {"hybrid_shard": "full_shard", "hybrid_shard_grad_op": "shard_grad_op"}
    cells = tuple((backend, each) for backend, strategy in FEWER for each in (strategy, pairs[strategy]))
    backend, strategy = cell
    assert played(one_group, cells, cell) == played(one_group, cells, (backend, pairs[strategy]))
