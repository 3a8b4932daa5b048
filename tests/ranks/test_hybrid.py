"""Hybrid strategies on 2 x 2 ranks: what each rank holds, what travels inside and between groups, and that it trains
the same."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from harness import Scenario, assert_conforms, curve, in_ranks, my_rank, own_share, play, share_of, train, values
from harness.training import ACCUMULATION, BACKENDS, DEEP, MICRO_BATCH, MICRO_BATCHES, configured
from test_options import Routing
from torch.distributed.tensor import DTensor

import unishard
from dev.ranks.recording import BLOCK, PARAMETERS, Countable, Recorder
from unishard.testing.conformance import TOLERANCES
from unishard.testing.models import mlp

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


SHARE = partial(share_of, world=WORLD)
MLP = Scenario(data=SHARE, world=WORLD)


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


@in_ranks(world=WORLD, cells=CELLS)
def test_parts_of_the_gradients_travel_between_groups_once_a_window_and_nothing_else(backend, strategy):
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
    assert {phase: dict(kinds) for phase, kinds in recorder.moved.items()} == MOVED[backend, strategy]


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


# -- what is not the same on all ranks -------------------------------------------------------------


def behind_the_first_window(number, rank):
    return SHARE(number + ACCUMULATION, rank)


@in_ranks(world=WORLD, cells=FEWER_SPANNING)
def test_an_infinite_gradient_in_one_group_leaves_out_the_update_in_all(backend, strategy, precision):
    """The first window has one on the last rank, in its first micro-batch."""
    data = own_share(MICRO_BATCHES + ACCUMULATION)
    if my_rank() == WORLD - 1:
        data[0] = data[0] | {"x": torch.full_like(data[0]["x"], math.inf)}
    cfg = hybrid(backend, strategy, precision)
    with unishard.prepare(mlp(), cfg) as engine:
        done = train(engine, data)
    skipped = [step.skipped for _, step in done if step.updated or step.skipped]
    assert skipped == [True, *[False] * (MICRO_BATCHES // ACCUMULATION)]
    wanted = Scenario(data=behind_the_first_window, world=WORLD).plain(cfg)
    assert_conforms(curve(done[ACCUMULATION:]), wanted, TOLERANCES[precision])


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


def routed_batch(routed, number, rank):
    return SHARE(number, rank) | {"routed": torch.full((MICRO_BATCH,), ROUTED[routed](number, rank))}


ROUTING = {routed: Scenario(Routing, data=partial(routed_batch, routed), world=WORLD) for routed in ROUTED}


@in_ranks(world=WORLD, cells=ROUTES)
def test_parameters_that_are_not_always_used_train_as_in_plain_torch(backend, strategy, precision, routed):
    native = {"reduce_scatter_unused_params": True} if routed == "in one group" else {}
    cfg = hybrid(backend, strategy, precision, sharding={"units": ["Part"]}, native={"fsdp": native})
    ROUTING[routed].judge(cfg, TOLERANCES[precision])


# -- beside other engines --------------------------------------------------------------------------


@in_ranks(world=WORLD, cells=FEWER)
def test_groups_are_those_of_one_engine_alone(backend, strategy):
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
    hybrid_size, plain_size = sizes
    assert hybrid_size > 1.5 * plain_size
    for one in done:
        assert_conforms(curve(one), MLP.plain(configured("fsdp", "full_shard")), TOLERANCES["fp32"])


@in_ranks(world=WORLD, cells=FEWER)
def test_where_one_group_holds_all_ranks_nothing_is_replicated(backend, strategy):
    """All ranks are one node, so that left out, a group is all of them."""
    found = []
    for each in (strategy, {"hybrid_shard": "full_shard", "hybrid_shard_grad_op": "shard_grad_op"}[strategy]):
        with unishard.prepare(mlp(), configured(backend, each)) as engine:
            found.append((engine.weights.placement(), MLP.train(engine)))
    assert found[0] == found[1]
