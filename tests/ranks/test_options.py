"""Options that the conformance suite leaves alone: each does what its rule says, and the maths stays that of plain
torch.

What they cost in collectives is in test_collectives.py.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness import PAIRS, Scenario, assert_conforms, in_ranks, play, prepare, share_of, tolerance, values
from harness.training import BACKENDS, DEEP, EVERY, PRECISIONS, SPANNING, configured
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from unishard.testing import conformance
from unishard.testing.conformance import TOLERANCES, Tolerance
from unishard.testing.models import MlpOutput

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
        return {"curve": MLP.train(engine)} | SEEN[backend](engine)


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
    return values(play(tuple((with_option, cell) for cell in CELLS))[with_option, cell])


MLP = Scenario()


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_an_option_about_memory_or_time_leaves_the_maths_alone(cell):
    cfg = config_of(*cell)
    assert_conforms(ran(*cell)[0]["curve"], MLP.plain(cfg), tolerance(cell[0], cfg.sharding.strategy, CELLS[cell]))


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


@in_ranks(cells=PAIRS)
def test_reducing_in_bf16_rounds_the_gradients_and_no_more(backend, strategy):
    found = {}
    for reduce in ("bf16", "fp32"):
        cfg = configured(backend, strategy, {"compute": "bf16", "reduce": reduce})
        with prepare(cfg) as engine:
            found[reduce] = MLP.train(engine)
    assert_conforms(found["bf16"], MLP.plain(configured(backend, strategy, "bf16")), ROUNDED)
    difference = conformance.compare(found["bf16"], found["fp32"])
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


def routed_batch(routed, number, rank):
    return share_of(number, rank) | {"routed": torch.full((2,), ROUTED[routed](number, rank))}


ROUTING = {routed: Scenario(Routing, data=partial(routed_batch, routed)) for routed in ROUTED}


@in_ranks(cells=ROUTES)
def test_parameters_that_are_not_always_used_train_as_in_plain_torch(backend, strategy, precision, native, routed):
    sharding = {"strategy": strategy} | ({"units": ["Part"]} if strategy != "no_shard" else {})
    ROUTING[routed].judge(configured(backend, sharding, precision, native={"fsdp": NATIVE[native]}))
