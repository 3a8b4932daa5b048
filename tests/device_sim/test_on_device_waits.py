"""Waits of the host in a warm step: none under FSDP2, and under DeepSpeed its own, whose number may not grow."""

from __future__ import annotations

import warnings
from functools import cache
from typing import NamedTuple

import pytest
import torch
from harness import config, own_share, prepare

from unishard.testing import run_ranks

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


class Waits(NamedTuple):
    """Of a warm step."""

    kinds: dict[str, float]
    files: list[str]
    """Where those are that torch warns of."""


def steps(backend: str, strategy: str, mode: str) -> Waits:
    """The waits of a warm step; under `error` the first one raises."""
    from simulated_cuda import device

    with warnings.catch_warnings(record=True) as caught, prepare(config(backend, strategy, optimizer=ADAMW)) as engine:
        for number, batch in enumerate(engine.batches(own_share(WARM + MEASURED))):
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
