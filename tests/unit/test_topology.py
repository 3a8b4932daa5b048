from __future__ import annotations

import pytest

from unishard import ConfigError, Topology
from unishard.config.topology import first_host, rendezvous


def test_torchrun() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert Topology.from_environment(environ) == Topology(
        world_size=8, local_world_size=4, rank=5, local_rank=1, launcher="torchrun"
    )


def test_a_launcher_that_sets_only_two() -> None:
    topology = Topology.from_environment({"RANK": "1", "WORLD_SIZE": "2"})
    assert (topology.local_world_size, topology.local_rank) == (2, 1)


def test_srun() -> None:
    environ = {
        "SLURM_PROCID": "5",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_NNODES": "2",
    }
    assert Topology.from_environment(environ) == Topology(
        world_size=8, local_world_size=4, rank=5, local_rank=1, launcher="srun"
    )


def test_srun_step_that_is_smaller_than_its_allocation() -> None:
    environ = {
        "SLURM_PROCID": "1",
        "SLURM_STEP_ID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "8",
        "SLURM_NNODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
    }
    topology = Topology.from_environment(environ)
    assert (topology.world_size, topology.local_world_size) == (2, 2)


def test_shell_of_an_allocation_is_one_rank() -> None:
    assert Topology.from_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) == Topology()


def test_plain_python() -> None:
    topology = Topology.from_environment({})
    assert (topology.world_size, topology.rank, topology.launcher) == (1, 0, "python")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "the environment variable WORLD_SIZE is not set; start with torchrun, srun or python"),
        ({"WORLD_SIZE": "2"}, "the environment variable RANK is not set; start with torchrun, srun or python"),
        (
            {"RANK": "zero", "WORLD_SIZE": "2"},
            "the environment variable RANK is 'zero', not a number; start with torchrun, srun or python",
        ),
        ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK=3 is invalid for WORLD_SIZE=2; ranks are 0 to 1"),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": ""},
            "the environment variable SLURM_NTASKS is '', not a number",
        ),
    ],
)
def test_broken_environment(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Topology.from_environment(environ)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu07", "gpu07"),
        ("gpu[03-05,9],login1", "gpu03"),
        ("gpu[3,9]", "gpu3"),
        ("a.example.org,b", "a.example.org"),
        ("127.0.0.1", "127.0.0.1"),
    ],
)
def test_the_first_host_of_a_slurm_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


SRUN = Topology(world_size=2, launcher="srun")


@pytest.mark.parametrize(
    ("topology", "environ", "where"),
    [
        (Topology(), {}, None),
        (Topology(world_size=2, launcher="torchrun"), {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, "env://"),
        (
            SRUN,
            {"SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_NODELIST": "gpu[01-09]", "SLURM_JOB_ID": "20007"},
            "tcp://gpu03:20007",
        ),
        (SRUN, {"SLURM_STEP_NODELIST": "gpu03", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}, "tcp://head:29500"),
    ],
    ids=["one rank", "torchrun", "srun", "srun with a job script's own"],
)
def test_where_the_ranks_meet(topology: Topology, environ: dict[str, str], where: str | None) -> None:
    assert rendezvous(topology, environ) == where


def test_half_an_environment() -> None:
    with pytest.raises(ConfigError, match="RANK and WORLD_SIZE are set, but not MASTER_PORT; start with torchrun"):
        rendezvous(Topology(world_size=2, launcher="torchrun"), {"MASTER_ADDR": "a"})
