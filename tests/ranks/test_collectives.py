"""Which collectives each strategy costs, when, and how much they move: what the names of the strategies mean."""

from __future__ import annotations

import pytest
from harness import BACKENDS, STRATEGIES, play, values
from harness import checked as config
from harness.training import MECHANISMS

from dev.ranks.recording import (
    ACCUMULATION,
    BLOCK,
    HEAD,
    INPUT,
    LARGEST,
    PARAMETERS,
    Countable,
    Indexed,
    moved,
    record,
    record_and_train,
    sizes,
)
from dev.ranks.recording import TABLE as TABLE_OF_EMBEDDINGS
from unishard import Topology
from unishard.contract import registry
from unishard.engine.model.shape import shape_of

NO_PREFETCH = {"communication": {"prefetch_bucket_size": 0}}
ALL_AHEAD = {"communication": {"prefetch_bucket_size": 50_000_000}}
TINY = 64

OPTIONS = {
    "default": {},
    "no prefetch": NO_PREFETCH,
    "one unit ahead": {"communication": {"prefetch_bucket_size": BLOCK}},
    "all ahead": ALL_AHEAD,
    "kept after forward": {"sharding": {"reshard_after_forward": False}} | ALL_AHEAD,
    "kept after forward, no prefetch": {"sharding": {"reshard_after_forward": False}} | NO_PREFETCH,
    "tiny buckets": {"communication": {"reduce_bucket_size": TINY}},
    "linear layers": {"sharding": {"units": ["Linear"]}} | NO_PREFETCH,
    "large linear layers": {"sharding": {"units": ["Linear"], "min_unit_params": 100}} | NO_PREFETCH,
    "bf16": {"precision": "bf16"},
    "bf16 reduced in bf16": {"precision": {"compute": "bf16", "reduce": "bf16"}},
}


def recorded(backend, strategy, option):
    """The blocks are the units, so that input and head are the root's."""
    sections = dict(OPTIONS[option])
    sharding = (
        {"strategy": strategy} | ({} if strategy == "no_shard" else {"units": ["Block"]}) | sections.pop("sharding", {})
    )
    return record(config(backend, sharding, training={"gradient_accumulation_steps": ACCUMULATION}, **sections))


P = PARAMETERS
GATHER, SCATTER, REDUCE = {"all_gather": P}, {"reduce_scatter": P}, {"all_reduce": P}
NORM = {"all_reduce": 1}
"""Of the norm, which is one number."""
AGAIN = {"all_gather": 3 * BLOCK} | SCATTER
"""FSDP2 keeps the root from forward to backward."""
LAST_KEPT = {"all_gather": 2 * BLOCK} | SCATTER
"""With prefetching the last unit, too."""

TABLE = {
    ("fsdp", "no_shard", "default"): {"backward 1": REDUCE},
    ("fsdp", "shard_optimizer", "default"): {"forward 0": GATHER, "backward 1": SCATTER, "step 1": NORM},
    ("fsdp", "shard_grad_op", "default"): {
        "forward 0": GATHER,
        "backward 0": SCATTER,
        "backward 1": SCATTER,
        "step 1": NORM,
    },
    **{
        ("fsdp", "full_shard", option): {
            "forward 0": GATHER,
            "backward 0": again,
            "forward 1": GATHER,
            "backward 1": again,
            "step 1": NORM,
        }
        for option, again in (
            ("default", LAST_KEPT),
            ("no prefetch", AGAIN),
            ("one unit ahead", LAST_KEPT),
            ("all ahead", LAST_KEPT),
        )
    },
    # Where the end of the window cannot be waited for, since FSDP2 would add up in bf16 what it has not reduced yet.
    ("fsdp", "no_shard", "bf16 reduced in bf16"): {"backward 0": REDUCE, "backward 1": REDUCE},
    ("fsdp", "shard_optimizer", "bf16 reduced in bf16"): {
        "forward 0": GATHER,
        "backward 0": SCATTER,
        "backward 1": SCATTER,
        "step 1": NORM,
    },
    ("deepspeed", "no_shard", "default"): {"step 1": REDUCE},
    ("deepspeed", "shard_optimizer", "default"): {"step 1": {"all_reduce": P + 1} | GATHER},
    **{
        cell: {"backward 0": REDUCE, "backward 1": REDUCE, "step 1": NORM | GATHER}
        for cell in (("deepspeed", "shard_optimizer", "bf16"), ("deepspeed", "shard_grad_op", "default"))
    },
    ("deepspeed", "full_shard", "no prefetch"): {
        "forward 0": GATHER,
        "backward 0": GATHER | SCATTER,
        "forward 1": GATHER,
        "backward 1": GATHER | SCATTER,
        "step 1": NORM,
    },
    **{
        (backend, "full_shard", option): {
            "forward 0": GATHER,
            "backward 0": SCATTER,
            "forward 1": GATHER,
            "backward 1": SCATTER,
            "step 1": NORM,
        }
        for backend in BACKENDS
        for option in ("kept after forward", "kept after forward, no prefetch")
    },
}
"""Elements that a window of two micro-batches moves, by phase and kind of collective; in all other phases nothing."""

CELLS = (
    *TABLE,
    ("deepspeed", "full_shard", "default"),
    ("deepspeed", "full_shard", "one unit ahead"),
    ("deepspeed", "full_shard", "all ahead"),
    *(
        (backend, strategy, "tiny buckets")
        for backend in BACKENDS
        for strategy in STRATEGIES
        if strategy != "shard_optimizer"
    ),
    ("deepspeed", "shard_optimizer", "tiny buckets"),
    *((backend, "full_shard", option) for backend in BACKENDS for option in ("linear layers", "large linear layers")),
    *((*pair, "bf16") for pair in MECHANISMS),
    *((*pair, "bf16 reduced in bf16") for pair in MECHANISMS if (*pair, "bf16 reduced in bf16") not in TABLE),
)


FLAGS = "uint8"
"""Format in which ranks on DeepSpeed ask each other which parameters a window used, a byte each. ZeRO's stages 1 and 2 in
16 bits also ask in it whether a gradient is not finite, a byte for all; nothing else travels in it."""


def events_of(*cell):
    """Of the third window, the same on both ranks, without those flags."""
    return [event for event in all_events_of(*cell) if event.dtype != FLAGS]


def all_events_of(*cell):
    first, second = values(play(tuple((recorded, cell) for cell in CELLS))[recorded, cell])
    assert first == second
    assert sum(event.numel for event in first) >= P, "the gradients of a window travel, and were not seen"
    return first


@pytest.mark.parametrize("cell", TABLE, ids="-".join)
def test_a_window_moves_what_its_strategy_means(cell):
    assert moved(events_of(*cell)) == TABLE[cell]


@pytest.mark.parametrize("cell", TABLE, ids="-".join)
def test_ranks_ask_which_parameters_were_used_only_where_they_may_use_different_ones(cell):
    """Once in an update."""
    asked = [(each.phase, each.kind) for each in all_events_of(*cell) if each.dtype == FLAGS and each.numel > 1]
    assert asked == ([("step 1", "all_reduce")] if cell[:2] == ("deepspeed", "no_shard") else [])


def test_the_micro_batches_phases_are_all_that_there_are():
    """So that the table says something about those it leaves out."""
    seen = {event.phase for event in events_of("deepspeed", "full_shard", "no prefetch")}
    assert seen == {f"{phase} {turn}" for phase in ("forward", "backward") for turn in range(ACCUMULATION)} | {"step 1"}


# -- units and prefetching -------------------------------------------------------------------------

LINEARS = [144, 136] * 3


@pytest.mark.parametrize(
    ("backend", "option", "gathered"),
    [
        ("fsdp", "no prefetch", [INPUT + HEAD, BLOCK, BLOCK, BLOCK]),
        ("fsdp", "kept after forward, no prefetch", [INPUT + HEAD, BLOCK, BLOCK, BLOCK]),
        ("fsdp", "linear layers", [INPUT, *LINEARS, HEAD]),
        ("fsdp", "large linear layers", [INPUT + HEAD, *LINEARS]),
        # What is in no unit is gathered module by module.
        ("deepspeed", "no prefetch", [INPUT, BLOCK, BLOCK, BLOCK, HEAD]),
        ("deepspeed", "kept after forward, no prefetch", [INPUT, BLOCK, BLOCK, BLOCK, HEAD]),
        ("deepspeed", "linear layers", [INPUT, *LINEARS, HEAD]),
        ("deepspeed", "large linear layers", [INPUT, *LINEARS, HEAD]),
    ],
)
def test_each_unit_is_gathered_by_one_collective(backend, option, gathered):
    events = events_of(backend, "full_shard", option)
    for turn in range(ACCUMULATION):
        assert sizes(events, "all_gather", f"forward {turn}") == gathered


def test_deepspeed_gathers_at_once_what_is_kept_and_fits_the_prefetch_bucket():
    assert sizes(events_of("deepspeed", "full_shard", "kept after forward"), "all_gather", "forward 0") == [P]


def ahead(events, phase, needed):
    """Elements that have been gathered beyond what is needed, as each block computes."""
    found, gathered = [], 0
    for event in events:
        if event.phase == phase and event.kind == "all_gather":
            gathered += event.numel
        elif event.phase == phase and event.kind == phase.split()[0]:
            needed += BLOCK
            found.append(gathered - needed)
    return found


@pytest.mark.parametrize(
    ("backend", "option", "forward"),
    [
        ("fsdp", "no prefetch", [0, 0, 0]),
        ("fsdp", "one unit ahead", [BLOCK, BLOCK, 0]),
        ("fsdp", "default", [BLOCK, BLOCK, 0]),
        ("fsdp", "all ahead", [2 * BLOCK, BLOCK, 0]),
        ("deepspeed", "no prefetch", [0, 0, 0]),
        ("deepspeed", "one unit ahead", [BLOCK, BLOCK, HEAD + BLOCK - 8]),
        ("deepspeed", "default", [BLOCK, BLOCK, HEAD + BLOCK - 8]),
        ("deepspeed", "all ahead", [BLOCK, BLOCK, HEAD + BLOCK - 8]),  # never more than two units at once
    ],
)
def test_as_much_is_gathered_ahead_as_the_prefetch_bucket_holds(backend, option, forward):
    events = events_of(backend, "full_shard", option)
    for turn in range(ACCUMULATION):
        assert ahead(events, f"forward {turn}", INPUT + HEAD if backend == "fsdp" else INPUT) == forward


def test_where_fsdp_prefetches_all_of_backward_it_does_so_at_once():
    assert ahead(events_of("fsdp", "full_shard", "all ahead"), "backward 1", -BLOCK) == [
        2 * BLOCK,
        BLOCK,
        0,
    ]  # the last is there
    assert ahead(events_of("fsdp", "full_shard", "default"), "backward 1", -BLOCK) == [BLOCK, BLOCK, 0]
    # torch's own prefetch: one unit ahead, after the first
    assert ahead(events_of("fsdp", "full_shard", "no prefetch"), "backward 1", 0) == [BLOCK, BLOCK, 0]


@pytest.mark.parametrize("option", ["default", "one unit ahead", "all ahead"])
def test_what_deepspeed_prefetched_for_backward_when_forward_ends_is_not_gathered_again(option):
    by_phase = moved(events_of("deepspeed", "full_shard", option))
    for turn in range(ACCUMULATION):
        both = by_phase[f"forward {turn}"]["all_gather"] + by_phase[f"backward {turn}"]["all_gather"]
        assert both == 2 * P - BLOCK - HEAD
    cfg = config(
        "deepspeed", {"units": ["Block"]}, training={"gradient_accumulation_steps": ACCUMULATION}, **OPTIONS[option]
    )
    planned = registry.get("deepspeed").footprint(shape_of(Countable(), cfg.sharding), cfg, Topology(2, 2)).traffic
    assert sum(each.nbytes for each in planned if each.kind == "all_gather") == 4 * ACCUMULATION * (
        2 * P - BLOCK - HEAD
    )


EMBEDDED = {
    "again": {"native": {"fsdp": {"unshard_embeddings_in_backward": True}}},
    "once": {},
    "recomputed": {"activation_checkpointing": ["Embedding"]},
}


def embedded(option):
    cfg = config(
        "fsdp",
        {"units": ["Block", "Embedding"]},
        training={"gradient_accumulation_steps": ACCUMULATION},
        **EMBEDDED[option],
    )
    return record_and_train(cfg, Indexed)


def test_backward_gathers_no_table_of_embeddings_and_trains_the_same_without():
    """Its gradient depends on the indices only."""
    played = play(tuple((embedded, (option,)) for option in EMBEDDED))
    trained = {option: values(played[embedded, (option,)]) for option in EMBEDDED}
    gathered = {}
    for option, ranks in trained.items():
        by_phase = moved(ranks[0][0])
        assert by_phase["forward 1"]["all_gather"] == P + TABLE_OF_EMBEDDINGS
        gathered[option] = by_phase["backward 1"]["all_gather"]
        assert [curve for _, curve in ranks] == [curve for _, curve in trained["again"]]
    assert gathered == {"again": 2 * BLOCK + TABLE_OF_EMBEDDINGS, "once": 2 * BLOCK, "recomputed": 2 * BLOCK}


@pytest.mark.parametrize("option", ["again", "once"])
def test_the_plan_knows_which_units_backward_gathers(option):
    cfg = config("fsdp", {"units": ["Block", "Embedding"]}, **EMBEDDED[option])
    planned = registry.get("fsdp").footprint(shape_of(Indexed(), cfg.sharding), cfg, Topology(2, 2)).traffic
    gathers = {each.phase: each.nbytes // 4 for each in planned if each.kind == "all_gather"}
    again = TABLE_OF_EMBEDDINGS if option == "again" else 0
    assert gathers == {"forward": P + TABLE_OF_EMBEDDINGS, "backward": 2 * BLOCK + again}


# -- reduction -------------------------------------------------------------------------------------

REDUCTIONS = {
    ("fsdp", "no_shard"): ("all_reduce", "backward 1"),
    ("deepspeed", "shard_optimizer"): ("all_reduce", "step 1"),
    ("deepspeed", "shard_grad_op"): ("all_reduce", "backward 0"),
    ("deepspeed", "full_shard"): ("reduce_scatter", "backward 0"),
}


@pytest.mark.parametrize("cell", REDUCTIONS, ids="-".join)
def test_gradients_are_reduced_in_buckets_of_the_asked_size(cell):
    kind, phase = REDUCTIONS[cell]
    whole = [size for size in sizes(events_of(*cell, "default"), kind, phase) if size > 1]
    tiny = [size for size in sizes(events_of(*cell, "tiny buckets"), kind, phase) if size > 1]
    assert whole == [P]
    assert sum(tiny) == P
    assert len(tiny) > 3
    # A parameter is never divided; DDP closes a bucket with the parameter that fills it, DeepSpeed before.
    assert max(tiny) <= (TINY + LARGEST if cell[0] == "fsdp" else LARGEST)


@pytest.mark.parametrize("strategy", ["shard_grad_op", "full_shard"])
def test_fully_shard_reduces_a_unit_at_once_whatever_the_bucket_size(strategy):
    tiny = events_of("fsdp", strategy, "tiny buckets")
    assert sizes(tiny, "reduce_scatter", "backward 1") == [BLOCK, BLOCK, BLOCK, INPUT + HEAD]


def test_deepspeed_uses_its_own_buckets_where_nothing_is_sharded():
    assert sizes(events_of("deepspeed", "no_shard", "tiny buckets"), "all_reduce", "step 1") == [P]


@pytest.mark.parametrize("option", ["default", "bf16", "bf16 reduced in bf16"])
@pytest.mark.parametrize(("backend", "strategy"), MECHANISMS)
def test_parameters_travel_in_the_compute_format_and_gradients_in_the_reduction_format(backend, strategy, option):
    large = [event for event in events_of(backend, strategy, option) if event.numel > 1]
    gathered = {event.dtype for event in large if event.kind == "all_gather"}
    reduced = {event.dtype for event in large if event.kind in ("reduce_scatter", "all_reduce")}
    assert gathered == ({"float32" if option == "default" else "bfloat16"} if strategy != "no_shard" else set())
    assert reduced == {"bfloat16" if option == "bf16 reduced in bf16" else "float32"}
    assert {event.kind for event in large} - {"forward", "backward"} <= {"all_gather", "reduce_scatter", "all_reduce"}
