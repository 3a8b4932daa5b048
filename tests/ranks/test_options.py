"""Options that the conformance suite leaves alone: each does what its rule says, and the maths stays that of plain
torch.

What they cost in collectives is in test_collectives.py.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from harness import PAIRS, assert_conforms, curve, own_share, play, prepare, tolerance, train, values, windows
from harness.training import ACCUMULATION, BACKENDS, DEEP, EVERY, MICRO_BATCHES, PRECISIONS, SPANNING, configured
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

import unishard
from unishard.testing import conformance, oracle
from unishard.testing.conformance import TOLERANCES, Tolerance
from unishard.testing.models import MlpOutput, batch, mlp

# -- options that change no result -----------------------------------------------------------------

SHARED = {
    "kept after forward": ("full_shard", {"sharding": {"reshard_after_forward": False}}),
    "two classes": ("full_shard", {"sharding": {"units": ["Block", "Linear"]}}),
    "linear layers": ("full_shard", {"sharding": {"units": ["Linear"]}}),
    "large linear layers": ("full_shard", {"sharding": {"units": ["Linear"], "min_unit_params": 500}}),
    "no prefetch": ("full_shard", {"communication": {"prefetch_bucket_size": 0}}),
    "little prefetch": ("full_shard", {"communication": {"prefetch_bucket_size": 900}}),
    "tiny buckets, no_shard": ("no_shard", {"communication": {"reduce_bucket_size": 100}}),
    "no overlap": ("full_shard", {"communication": {"overlap": False}}),
}
OWN = {
    "fsdp": {
        "separate group": ("full_shard", {"native": {"fsdp": {"separate_reduce_scatter_group": True}}}),
    },
    "deepspeed": {
        "tiny buckets, shard_optimizer": ("shard_optimizer", {"communication": {"reduce_bucket_size": 100}}),
        "tiny buckets, shard_grad_op": ("shard_grad_op", {"communication": {"reduce_bucket_size": 100}}),
        "tiny buckets, full_shard": ("full_shard", {"communication": {"reduce_bucket_size": 100}}),
        "overlap": ("full_shard", {}),
        "no overlap, shard_grad_op": ("shard_grad_op", {"communication": {"overlap": False}}),
        "sub groups": ("full_shard", {"native": {"deepspeed": {"zero_optimization": {"sub_group_size": 700}}}}),
    },
}
IN_TURN = {
    "no prefetch": "deepspeed",
    "little prefetch": "fsdp",
    "tiny buckets, no_shard": "deepspeed",
    "no overlap": "deepspeed",
}
"""Engines on which an option of both trains without `--deep`: test_collectives.py has what it does to either."""
CELLS = {
    (backend, option): PRECISIONS[(first + number) % 2]
    for first, backend in enumerate(BACKENDS)
    for number, option in enumerate((*SHARED, *OWN[backend]))
    if DEEP or IN_TURN.get(option, backend) == backend
}
"""The precision in which a backend runs with an option. Options of both run in one on each."""


def config_of(backend, option):
    strategy, sections = (SHARED | OWN[backend])[option]
    given = dict(sections)
    return configured(backend, {"strategy": strategy} | given.pop("sharding", {}), CELLS[backend, option], **given)


def with_option(backend, option):
    with prepare(config_of(backend, option)) as engine:
        found = curve(train(engine, own_share(MICRO_BATCHES)))
        return {"curve": found} | SEEN[backend](engine)


def seen_in_fsdp(engine):
    """Read off FSDP2's own objects, which say how they will move tensors."""
    groups = [
        group
        for part in engine.module.modules()
        if isinstance(part, FSDPModule)
        for group in part._get_fsdp_state()._fsdp_param_groups
    ]
    return {"reduces in": {group._reduce_scatter_process_group.group_desc for group in groups}}


def seen_in_deepspeed(engine):
    """Read off DeepSpeed's engine and its optimizer, which have acted on their config."""
    groups = getattr(engine._adapter.updates.optimizer, "fp32_partitioned_groups_flat", ())
    return {"sub groups": [group.numel() for group in groups]}


SEEN = {"fsdp": seen_in_fsdp, "deepspeed": seen_in_deepspeed}


def ran(*cell):
    """What both ranks say."""
    found = values(play(tuple((with_option, cell) for cell in CELLS))[with_option, cell])
    assert found[0]["curve"] == found[1]["curve"]
    return found


@cache
def expected(precision):
    return oracle.train(mlp(), windows(), configured("fsdp", "full_shard", precision), world=2)


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_an_option_about_memory_or_time_leaves_the_maths_alone(cell):
    cfg = config_of(*cell)
    wanted = expected(CELLS[cell])
    assert_conforms(ran(*cell)[0]["curve"], wanted, tolerance(cell[0], cfg.sharding.strategy, CELLS[cell]))


def test_a_native_setting_reaches_deepspeed():
    for plain, divided in zip(ran("deepspeed", "overlap"), ran("deepspeed", "sub groups"), strict=True):
        assert len(plain["sub groups"]) == 1
        assert len(divided["sub groups"]) == 4
        assert sum(divided["sub groups"]) == sum(plain["sub groups"])


def test_gradients_are_reduced_in_a_group_of_their_own():
    assert [found["reduces in"] for found in ran("fsdp", "separate group")] == [{"fsdp_reduce_scatter"}] * 2
    assert [found["reduces in"] & {"fsdp_reduce_scatter"} for found in ran("fsdp", "kept after forward")] == [set()] * 2


# -- precision.reduce: bf16 ------------------------------------------------------------------------

ROUNDED = Tolerance(
    1e-3,
    3e-3,
    1e-3,
    3e-3,
    "each rank's gradients are rounded to 8 bits before they are summed, and the sum once more: 2e-3 in an element, "
    "less in the norm",
)
REDUCED = tuple((*pair, reduce) for pair in PAIRS for reduce in ("fp32", "bf16"))


def reduced(backend, strategy, reduce):
    with prepare(configured(backend, strategy, {"compute": "bf16", "reduce": reduce})) as engine:
        return curve(train(engine, own_share(MICRO_BATCHES)))


@pytest.mark.parametrize(("backend", "strategy"), PAIRS)
def test_reducing_in_bf16_rounds_the_gradients_and_no_more(backend, strategy):
    played = play(tuple((reduced, cell) for cell in REDUCED))
    low, own = (values(played[reduced, (backend, strategy, reduce)]) for reduce in ("bf16", "fp32"))
    assert low[0] == low[1]
    assert_conforms(low[0], expected("bf16"), ROUNDED)
    difference = conformance.compare(low[0], own[0])
    assert difference.first_norm > TOLERANCES["bf16"].first_norm
    assert difference.losses > 1e-5


# -- parameters that a rank does not always use ----------------------------------------------------


class Part(nn.Module):
    """Its second layer sees only the samples that are routed to it."""

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(13, 13)
        self.sometimes = nn.Linear(13, 13)

    def forward(self, x, routed):
        out = x + self.always(x)
        if routed.any():
            chosen = routed.nonzero().flatten()
            out = out.index_add(0, chosen, self.sometimes(x[chosen]))
        return out


class Routing(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Part(), Part()])
        self.head = nn.Linear(13, 11)

    def forward(self, x, labels, routed):
        for part in self.parts:
            x = part(x, routed)
        logits = self.head(x)
        return MlpOutput(functional.cross_entropy(logits.float(), labels), logits)


def routing():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Routing()


ROUTED = {
    "on one rank": lambda turn, rank: rank == 0 and turn in (1, 2, 4, 5, 7),
    "on one rank, in some windows": lambda turn, rank: rank == 0 and turn in (1, 4, 5),
    "on both ranks, in some micro-batches": lambda turn, rank: turn in (0, 3, 5, 6),
}
FIND = {"find_unused_parameters": True}
FILL = {"reduce_scatter_unused_params": True}
NATIVE = {"find": FIND, "fill": FILL, "none": {}}

ROUTES = (
    *(("fsdp", "no_shard", "fp32", "find", routed) for routed in ROUTED),
    *(("fsdp", strategy, precision, "fill", "on one rank") for _, strategy, precision in EVERY[1:4]),
    ("fsdp", "no_shard", "bf16", "fill", "on one rank"),
    ("fsdp", "no_shard", "bf16", "none", "on both ranks, in some micro-batches"),
    *((*cell, "none", "on both ranks, in some micro-batches") for cell in SPANNING if cell[1] != "no_shard"),
)


def routed_batch(turn, rank, routed):
    return batch("mlp", (2 * turn + rank) * 2, 2) | {"routed": torch.full((2,), ROUTED[routed](turn, rank))}


def routes(backend, strategy, precision, native, routed):
    rank = unishard.Topology.from_environment().rank
    sharding = {"strategy": strategy} | ({"units": ["Part"]} if strategy != "no_shard" else {})
    with unishard.prepare(
        routing(), configured(backend, sharding, precision, native={"fsdp": NATIVE[native]})
    ) as engine:
        return curve(train(engine, [routed_batch(turn, rank, routed) for turn in range(MICRO_BATCHES)]))


@pytest.mark.parametrize("cell", ROUTES, ids="-".join)
def test_parameters_that_are_not_always_used_train_as_in_plain_torch(cell):
    backend, strategy, precision, _, routed = cell
    found = values(play(tuple((routes, cell) for cell in ROUTES))[routes, cell])
    assert found[0] == found[1]
    batches = [
        [routed_batch(turn, rank, routed) for turn in range(start, start + ACCUMULATION) for rank in (0, 1)]
        for start in range(0, MICRO_BATCHES, ACCUMULATION)
    ]
    wanted = oracle.train(routing(), batches, configured("fsdp", strategy, precision), world=2)
    assert_conforms(found[0], wanted, tolerance(backend, strategy, precision))
