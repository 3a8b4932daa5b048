"""What each launcher's variables are taken for: never for a single rank where they say that there are several."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unishard import ConfigError, Topology
from unishard.config.launchers import forgotten_srun
from unishard.config.rendezvous import first_host, rendezvous, store_of_launcher

Environ = dict[str, str]

# -- every launcher, any number of nodes -----------------------------------------------------------


def open_mpi(rank: int, local: int, world: int, per_node: int, node: int) -> Environ:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    own = zip(names, map(str, (rank, world, local, per_node)), strict=True)
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in own} | {"PMIX_RANK": str(rank)}


def mvapich(rank: int, local: int, world: int, per_node: int, node: int) -> Environ:
    names = ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE")
    return dict(zip(names, map(str, (rank, world, local, per_node)), strict=True))


def hydra(rank: int, local: int, world: int, per_node: int, node: int) -> Environ:
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return dict(zip(names, map(str, (rank, world, local, per_node)), strict=True))


def pals(rank: int, local: int, world: int, per_node: int, node: int) -> Environ:
    names = ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", "PALS_RANKID")
    return dict(zip(names, map(str, (rank, world, local, per_node, rank)), strict=True))


def jsrun(rank: int, local: int, world: int, per_node: int, node: int) -> Environ:
    names = ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE")
    return dict(zip(names, map(str, (rank, world, local, per_node)), strict=True))


def srun(rank: int, local: int, world: int, per_node: int, node: int) -> Environ:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_STEP_NUM_NODES": str(world // per_node),
        "SLURM_STEP_NODELIST": "gpu[01-09]",
        "SLURM_NTASKS": "64",
    }


def srun_before_its_steps_were_counted(rank: int, local: int, world: int, per_node: int, node: int) -> Environ:
    whole = {"SLURM_NTASKS": str(world), "SLURM_NNODES": str(world // per_node), "SLURM_NODELIST": "gpu[01-09]"}
    return {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local)} | whole


def srun_pmi2(rank: int, local: int, world: int, per_node: int, node: int) -> Environ:
    return srun(rank, local, world, per_node, node) | {"PMI_RANK": str(rank), "PMI_SIZE": str(world)}


def srun_pmix(rank: int, local: int, world: int, per_node: int, node: int) -> Environ:
    return srun(rank, local, world, per_node, node) | {"PMIX_RANK": str(rank)}


def _daemons(node: int, nodes: int) -> Environ:
    """What mpirun's daemons, which srun has started one per node, leave in the environment of the ranks."""
    return srun(node, 0, nodes, 1, node)


def open_mpi_in_slurm(rank: int, local: int, world: int, per_node: int, node: int) -> Environ:
    return _daemons(node, world // per_node) | open_mpi(rank, local, world, per_node, node)


def hydra_in_slurm(rank: int, local: int, world: int, per_node: int, node: int) -> Environ:
    return _daemons(node, world // per_node) | hydra(rank, local, world, per_node, node)


def torchrun(rank: int, local: int, world: int, per_node: int, node: int) -> Environ:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return dict(zip(names, (*map(str, (rank, world, local, per_node)), "gpu01", "29500"), strict=True))


def torchrun_in_slurm(rank: int, local: int, world: int, per_node: int, node: int) -> Environ:
    return _daemons(node, world // per_node) | torchrun(rank, local, world, per_node, node)


def deepspeed(rank: int, local: int, world: int, per_node: int, node: int) -> Environ:
    renamed = torchrun(rank, local, world, per_node, node)
    return renamed | {
        "LOCAL_SIZE": renamed.pop("LOCAL_WORLD_SIZE"),
        "CROSS_RANK": str(node),
        "CROSS_SIZE": str(world // per_node),
    }


def rank_set_in_a_job_script(rank: int, local: int, world: int, per_node: int, node: int) -> Environ:
    """`export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS` under srun."""
    given = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "gpu01", "MASTER_PORT": "29500"}
    return srun(rank, local, world, per_node, node) | given


def size_set_in_a_job_script(rank: int, local: int, world: int, per_node: int, node: int) -> Environ:
    """`export WORLD_SIZE=... MASTER_ADDR=... MASTER_PORT=...` before srun, which many clusters' guides show."""
    return srun(rank, local, world, per_node, node) | {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "gpu01",
        "MASTER_PORT": "29500",
    }


LAUNCHERS = {
    open_mpi: "mpirun",
    mvapich: "mpirun",
    hydra: "mpirun",
    pals: "mpirun",
    jsrun: "mpirun",
    open_mpi_in_slurm: "mpirun",
    hydra_in_slurm: "mpirun",
    srun: "srun",
    srun_before_its_steps_were_counted: "srun",
    srun_pmi2: "srun",
    srun_pmix: "srun",
    size_set_in_a_job_script: "srun",
    torchrun: "torchrun",
    torchrun_in_slurm: "torchrun",
    deepspeed: "torchrun",
    rank_set_in_a_job_script: "torchrun",
}


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.__name__)
@given(nodes=st.integers(1, 4), per_node=st.integers(1, 4))
def test_every_rank_of_every_launcher_knows_its_place(launcher, nodes, per_node):
    world = nodes * per_node
    address = {"MASTER_ADDR": "gpu01", "MASTER_PORT": "29500"}
    met = set()
    for rank in range(world):
        node, local = divmod(rank, per_node)
        environ = launcher(rank, local, world, per_node, node)
        topology = Topology.from_environment(environ)
        assert (topology.rank, topology.world_size) == (rank, world)
        assert (topology.local_rank, topology.local_world_size) == (local, per_node)
        if launcher is not hydra_in_slurm or per_node > 1:  # else the daemons are numbered as the ranks are
            assert topology.launcher == LAUNCHERS[launcher]
        met.add(rendezvous(topology, environ | (address if topology.launcher == "mpirun" else {})))
    assert len(met) == 1, "all ranks meet at one address"
    assert (met == {None}) == (world == 1 and LAUNCHERS[launcher] != "torchrun")


# -- one process -----------------------------------------------------------------------------------

# What the shell of `salloc` has with `LaunchParameters=use_interactive_step`, the usual setting; from a real one.
INTERACTIVE = {
    "SLURM_JOB_ID": "1731344",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "GPU71E4",
    "SLURM_TASKS_PER_NODE": "8",
    "SLURM_NNODES": "1",
    "SLURM_MPI_TYPE": "pmix",
}


PLAIN = {
    "a laptop": {},
    "salloc on a login node": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"},
    "salloc's interactive step": INTERACTIVE,
    "salloc -n 8": INTERACTIVE | {"SLURM_NTASKS": "8"},
    "a batch script": {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"},
    "a batch script's step": {"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291", "SLURM_NTASKS": "8"},
    "accelerate launch --num_processes 1": {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True"},
    "an address in a shell's profile": {"MASTER_ADDR": "gpu01", "MASTER_PORT": "29500"},
}


@pytest.mark.parametrize("environ", PLAIN.values(), ids=PLAIN)
def test_a_plain_script_is_one_rank(environ):
    assert Topology.from_environment(environ) == Topology()
    assert rendezvous(Topology(), environ) is None


@pytest.mark.parametrize("launcher", [open_mpi, hydra, srun], ids=lambda launcher: launcher.__name__)
def test_a_launcher_of_one_process_needs_no_address(launcher):
    environ = launcher(0, 0, 1, 1, 0)
    topology = Topology.from_environment(environ)
    assert topology.world_size == 1
    assert rendezvous(topology, environ) is None


def test_a_batch_script_without_srun_is_told_so_where_it_has_several_tasks():
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    assert forgotten_srun(script) == (
        "this Slurm job has 8 tasks, but this script runs on one rank; to train on all of them, start it with srun"
    )
    assert {
        forgotten_srun(each) for each in ({}, script | {"SLURM_NTASKS": "1"}, INTERACTIVE, {"SLURM_NTASKS": "8"})
    } == {None}


# -- what cannot be read is named ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        (mvapich, "mpirun_rsh -np 4 -hostfile HOSTS MASTER_ADDR=HOST MASTER_PORT=29500 python train.py"),
        (jsrun, "jsrun -E MASTER_ADDR=HOST -E MASTER_PORT=29500 -n 4 python train.py"),
        (hydra, "mpirun -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 -n 4 python train.py"),
        (hydra_in_slurm, "mpirun -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 -n 4 python train.py"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_ranks_of_mpirun_without_an_address_are_told_what_to_type(launcher, command):
    environ = launcher(1, 1, 4, 2, 0)
    with pytest.raises(ConfigError) as caught:
        rendezvous(Topology.from_environment(environ), environ)
    assert "has started 4 ranks, which cannot find each other without MASTER_ADDR and MASTER_PORT; " in str(
        caught.value
    )
    assert str(caught.value).endswith(command)
    with pytest.raises(ConfigError, match="cannot find each other without MASTER_PORT; "):
        rendezvous(Topology.from_environment(environ), environ | {"MASTER_ADDR": "gpu01"})


UNREADABLE = [
    ({"FLUX_TASK_RANK": "0"}, "FLUX_TASK_RANK=0 says .* for a single rank, unset FLUX_TASK_RANK"),
    ({"PMI_RANK": "1"}, "the environment variable PMI_SIZE is not set"),
    ({"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is 'x', not a number"),
    ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, "the environment variable SLURM_NTASKS is not set"),
    (
        {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": ""},
        "the environment variable SLURM_NTASKS is '', not a number",
    ),
    ({"RANK": "0"}, "the environment variable WORLD_SIZE is not set; start with torchrun, srun or python"),
    ({"WORLD_SIZE": "2"}, "the environment variable RANK is not set; start with torchrun, srun or python"),
    ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK is 'zero', not a number; start with torchrun, srun or python"),
    ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK=3 is invalid for WORLD_SIZE=2; ranks are 0 to 1"),
    (
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
        "RANK and WORLD_SIZE are set, but not MASTER_PORT; start with torchrun",
    ),
]


@pytest.mark.parametrize(("environ", "message"), UNREADABLE)
def test_a_launcher_that_cannot_be_read_is_named(environ, message):
    with pytest.raises(ConfigError, match=message):
        rendezvous(Topology.from_environment(environ), environ)


def test_a_launcher_that_sets_only_two():
    topology = Topology.from_environment({"RANK": "1", "WORLD_SIZE": "2"})
    assert (topology.local_world_size, topology.local_rank) == (2, 1)


# -- where the ranks meet --------------------------------------------------------------------------


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
def test_the_first_host_of_a_slurm_list(hosts, first):
    assert first_host(hosts) == first


def test_where_the_ranks_meet():
    for launcher, more, where in (
        (torchrun, {}, "env://"),
        (srun, {"SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "20007"}, "tcp://gpu03:20007"),
        (size_set_in_a_job_script, {"MASTER_ADDR": "head"}, "tcp://head:29500"),
        (srun, {"MASTER_ADDR": "fd00::1", "MASTER_PORT": "29500"}, "tcp://[fd00::1]:29500"),
    ):
        environ = launcher(0, 0, 2, 2, 0) | more
        assert rendezvous(Topology.from_environment(environ), environ) == where
    assert store_of_launcher("tcp://[fd00::1]:29500") == ("fd00::1", 29500, False)


def test_two_steps_of_a_job_meet_at_two_ports():
    first = srun(0, 0, 2, 2, 0)
    other = first | {"SLURM_STEP_ID": "1"}
    assert {rendezvous(Topology.from_environment(each), each) for each in (first, other)} == {
        "tcp://gpu01:20007",
        "tcp://gpu01:27926",
    }
