"""Ranks that other launchers than torchrun start train on both engines."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist
from harness import BACKENDS, own_share, prepare, train
from harness import checked as config

import unishard
from unishard.testing import run_ranks

pytestmark = pytest.mark.ranks


def with_variables_of(launcher):
    """Train on each engine with only this launcher's variables; the losses."""
    rank = os.environ["RANK"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    for name, value in launcher.items():
        os.environ[name] = value.format(rank=rank)
    assert unishard.Topology.from_environment().rank == int(rank)
    losses = []
    for backend in BACKENDS:
        with prepare(config(backend)) as engine:
            assert (dist.get_rank(), dist.get_world_size()) == (int(rank), 2)
            losses.append([loss for loss, _ in train(engine, own_share(2))])
    return losses


@pytest.mark.parametrize(
    "launcher",
    [
        {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}"},
        {"SLURM_PROCID": "{rank}", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "{rank}", "SLURM_STEP_NUM_TASKS": "2"},
    ],
    ids=["mpirun", "srun"],
)
def test_ranks_of_a_launcher_train_together(launcher):
    first, second = run_ranks(2, with_variables_of, launcher)
    assert first == second
    fsdp, deepspeed = first
    assert fsdp == pytest.approx(deepspeed, rel=1e-6)
