"""Waits of the host in a warm step: none under FSDP2, and under DeepSpeed its own, whose number may not grow."""

from __future__ import annotations

import warnings
from functools import cache
from typing import NamedTuple

import pytest
import torch
from harness import config, own_share, prepare, share

import unishard
from unishard.testing import run_ranks
from unishard.testing.features import FEATURES

ADAMW = {"name": "adamw", "lr": 1e-2}
WARM, MEASURED = 10, 4
"""The guards of the loop look closely in the first ten updates."""
FSDP = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
NORM = {"copy_ to the device": 1, "item": 1}
DEEPSPEED = {
    "no_shard": {"event synchronize": 1},
    "shard_optimizer": NORM,
    "shard_grad_op": NORM | {"device synchronize": 1},
    "full_shard": NORM | {"stream synchronize": 1, "event synchronize": 8},
}
"""The waits of a step, by kind. Those of stages 1 to 3 are DeepSpeed's own (0.19.8): it copies parts of the norm to the
device and reads whether it is finite (runtime/zero/stage_1_and_2.py, runtime/utils.py), and waits for its reductions
and gathers."""
SHARED = {"aten::equal": 2, "aten::nonzero": 1, "copy_ to the host": 1, "event synchronize": 1, "item": 1}
"""Of ranks that share samples under FSDP2: they compare their positions and read where documents begin, and
transformers asks whether positions are padded."""


class Waits(NamedTuple):
    """Of a warm step."""

    kinds: dict[str, float]
    files: list[str]
    """Where those are that torch warns of."""


def steps(backend: str, strategy: str, mode: str) -> Waits:
    """The waits of a warm step; under `error` the first one raises."""
    with prepare(config(backend, strategy, optimizer=ADAMW)) as engine:
        return waits(engine, own_share(WARM + MEASURED), mode)


def shared(feature: str) -> Waits:
    """The waits of a warm step of ranks that share samples."""
    (model,) = FEATURES[feature].models.values()
    cfg = config("fsdp", "full_shard", optimizer=ADAMW, parallel=FEATURES[feature].sections["parallel"])
    with unishard.prepare(model.build(), cfg) as engine:
        return waits(engine, share(WARM + MEASURED, rank=0, world=1, model="llama"), "warn")


def with_experts(sizes: tuple[int, ...]) -> list[Waits]:
    """The waits of a warm step of a mixture whose experts are divided by each size."""
    found = []
    for size in sizes:
        model = FEATURES["experts"].models["mixtral"].build()
        model.set_experts_implementation("batched_mm")  # the others wait themselves
        with unishard.prepare(
            model, config("fsdp", "full_shard", optimizer=ADAMW, parallel={"expert": size})
        ) as engine:
            found.append(waits(engine, share(WARM + MEASURED, rank=0, world=1, model="llama"), "warn"))
    return found


def waits(engine: unishard.Engine, data: list[dict[str, torch.Tensor]], mode: str) -> Waits:
    """The waits of a warm step."""
    from simulated_cuda import device

    with warnings.catch_warnings(record=True) as caught:
        for number, batch in enumerate(engine.batches(data)):
            if number == WARM:
                torch.cuda.synchronize()
                device.reset_counts()
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode(mode)
            engine.backward(engine(**batch).loss)
            engine.step()
        torch.cuda.set_sync_debug_mode("default")
        found = device.counts()
    kinds = {
        name.removeprefix("waits: "): number / MEASURED for name, number in found.items() if name.startswith("waits: ")
    }
    return Waits(
        kinds, [warning.filename for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    )


def on_a_rank(backend: str, strategies: tuple[str, ...], mode: str) -> list[Waits]:
    return [steps(backend, strategy, mode) for strategy in strategies]


@cache
def played(backend: str, strategies: tuple[str, ...], mode: str) -> list[list[Waits]]:
    return run_ranks(2, on_a_rank, backend, strategies, mode, timeout=300)


@pytest.mark.parametrize("strategy", FSDP)
def test_a_warm_step_of_fsdp_waits_for_nothing(strategy):
    for rank in played("fsdp", FSDP, "error"):
        # What is left is the event behind the number that an earlier step has copied to the host.
        kinds = rank[FSDP.index(strategy)].kinds
        assert kinds.keys() <= {"event synchronize"}
        assert kinds.get("event synchronize", 0) <= 1


@pytest.mark.parametrize("strategy", DEEPSPEED)
def test_the_waits_of_deepspeed_do_not_grow_and_none_is_ours(strategy):
    for rank in played("deepspeed", tuple(DEEPSPEED), "warn"):
        kinds, files = rank[tuple(DEEPSPEED).index(strategy)]
        assert {name: number for name, number in kinds.items() if number > DEEPSPEED[strategy].get(name, 0)} == {}
        assert [file for file in files if "site-packages/deepspeed" not in file] == []
        assert bool(files) is (strategy != "no_shard")


RECURRENCES = ("recurrences_by_heads", "recurrences_by_states")


def on_a_rank_shared(features: tuple[str, ...]) -> list[Waits]:
    return [shared(feature) for feature in features]


def test_a_step_waits_for_nothing_more_where_recurrences_are_split():
    for rank in run_ranks(2, on_a_rank_shared, RECURRENCES, timeout=300):
        for found in rank:
            assert {name: number for name, number in found.kinds.items() if number > SHARED.get(name, 0)} == {}


LAYERS = 2


def test_a_layer_with_divided_experts_waits_once():
    for whole, divided in run_ranks(2, with_experts, (1, 2), timeout=300):
        assert divided.kinds == whole.kinds | {"copy_ to the host": LAYERS}
