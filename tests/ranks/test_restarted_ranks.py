"""Ranks that torchrun has started anew on one host find each other, and not those that are gone."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from harness import checked as config
from harness import own_share, prepare, train

import unishard
from unishard.testing import run_ranks

pytestmark = pytest.mark.ranks


def losses() -> list[float]:
    if unishard.Topology.from_environment().rank == 0:
        time.sleep(0.5)  # the others look first
    with prepare(config("fsdp")) as engine:
        return [loss for loss, _ in train(engine, own_share(2))]


def test_ranks_that_are_started_anew_do_not_look_for_those_that_are_gone():
    agent = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    told = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(agent.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GROUP_WORLD_SIZE": "1",
    }
    lives = [
        run_ranks(2, losses, env=told | {"TORCHELASTIC_RESTART_COUNT": str(life)}, timeout=60) for life in range(2)
    ]
    assert lives[0] == lives[1]
