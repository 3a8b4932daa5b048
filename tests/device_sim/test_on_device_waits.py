"""Waits of the host in a warm step: none under FSDP2, and under DeepSpeed its own, whose number may not grow."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from playing import config, own_share, prepare

from unishard.testing import run_ranks

ADAMW = {"name": "adamw", "lr": 1e-2}
WARM, MEASURED = 4, 4
FSDP = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
NORM = {"copy_ to the device": 1, "item": 1}
DEEPSPEED = {
    "no_shard": {"event synchronize": 1},
    "shard_optimizer": NORM,
    "shard_grad_op": NORM | {"device synchronize": 1},
    "full_shard": NORM | {"stream synchronize": 1, "event synchronize": 8},
}
"""The waits of a step, by kind. Those of stages 1 to 3 are DeepSpeed's own (0.19.8): it copies parts of the norm to the device and reads
whether it is finite (runtime/zero/stage_1_and_2.py, runtime/utils.py), and waits for its reductions and gathers."""


def steps(backend: str, strategy: str, mode: str) -> dict[str, float]:
    """The waits of a warm step, by kind; under `error` the first one raises."""
    from simulated_cuda import device

    with prepare(config(backend, strategy, optimizer=ADAMW)) as engine:
        for number, batch in enumerate(engine.batches(own_share(WARM + MEASURED))):
            if number == WARM:
                torch.cuda.synchronize()
                device.reset_counts()
                torch.cuda.set_sync_debug_mode(mode)
            engine.backward(engine(**batch).loss)
            engine.step()
        torch.cuda.set_sync_debug_mode("default")
        found = device.counts()
    return {name.removeprefix("waits: "): number / MEASURED for name, number in found.items() if name.startswith("waits: ")}


def on_a_rank(backend: str, strategies: tuple[str, ...], mode: str) -> list[dict[str, float]]:
    return [steps(backend, strategy, mode) for strategy in strategies]


@cache
def played(backend: str, strategies: tuple[str, ...], mode: str) -> list[list[dict[str, float]]]:
    return run_ranks(2, on_a_rank, backend, strategies, mode, timeout=300)


@pytest.mark.parametrize("strategy", FSDP)
def test_a_warm_step_of_fsdp_waits_for_nothing(strategy):
    for rank in played("fsdp", FSDP, "error"):
        # What is left is the event behind the number that an earlier step has copied to the host.
        assert rank[FSDP.index(strategy)].keys() <= {"event synchronize"}
        assert rank[FSDP.index(strategy)].get("event synchronize", 0) <= 1


@pytest.mark.parametrize("strategy", DEEPSPEED)
def test_the_waits_of_deepspeed_do_not_grow(strategy):
    for rank in played("deepspeed", tuple(DEEPSPEED), "default"):
        found = rank[tuple(DEEPSPEED).index(strategy)]
        assert {name: number for name, number in found.items() if number > DEEPSPEED[strategy].get(name, 0)} == {}
