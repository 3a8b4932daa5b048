"""The environment variables by which launchers number the processes that they start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from unishard.errors import ConfigError, Problem

Environ = Mapping[str, str]


class Place(NamedTuple):
    """One process among those that a launcher has started."""

    launcher: str
    """`torchrun`, `srun` or `mpirun`."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


class Mpi(NamedTuple):
    """An MPI launcher: its variables, and how to pass on others.

    Where several are listed, the first that is set counts.
    """

    name: str
    rank: str
    world_size: str
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    start: str
    """A command line that starts N ranks with the two variables of torch's rendezvous."""


MPI = (
    Mpi(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 -n {n} python train.py",
    ),
    Mpi(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
        "mpirun_rsh -np {n} -hostfile HOSTS MASTER_ADDR=HOST MASTER_PORT=29500 python train.py",
    ),
    Mpi(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE",),
        "jsrun -E MASTER_ADDR=HOST -E MASTER_PORT=29500 -n {n} python train.py",
    ),
    # Hydra, which MPICH, Intel MPI and MVAPICH 3 start with, sets MPI_LOCALRANKID; Cray's PALS sets the others.
    Mpi(
        "MPICH or Intel MPI",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        "mpirun -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 -n {n} python train.py",
    ),
)

UNSIZED = ("PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE", "FLUX_TASK_RANK")
"""Variables of launchers that number their processes without saying how many there are."""

_SHELLS = {"4294967290", "4294967291"}
"""Steps that are no start by srun: the interactive shell of `salloc`, and a batch script (slurm.h,
SLURM_INTERACTIVE_STEP and SLURM_BATCH_SCRIPT)."""


def torchrun(environ: Environ) -> Place:
    """The place that `RANK` and `WORLD_SIZE` say, as torchrun, DeepSpeed's launcher and `accelerate launch` set them.

    Raises:
        ConfigError: One is missing or no number, or the rank is outside the world.
    """
    rank, world = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise ConfigError([Problem("", f"RANK={rank} is invalid for WORLD_SIZE={world}; ranks are 0 to {world - 1}")])
    local_rank, local_size = rank, world
    if "LOCAL_RANK" not in environ:
        # A job script that sets RANK from another launcher's variable leaves the place on the node to that launcher.
        below = started_by(environ)
        if below is not None and (below.rank, below.world_size) == (rank, world):
            local_rank, local_size = below.local_rank, below.local_world_size
    return Place(
        "torchrun",
        rank,
        world,
        number(environ, "LOCAL_RANK", default=local_rank),
        number(environ, "LOCAL_WORLD_SIZE", "LOCAL_SIZE", default=local_size),  # DeepSpeed's launcher sets LOCAL_SIZE
    )


def started_by(environ: Environ) -> Place | None:
    """The place that srun's or an MPI launcher's variables say; None without them.

    Raises:
        ConfigError: A variable is missing or no number.
    """
    step = _step(environ)
    for mpi in MPI:
        if mpi.rank not in environ and mpi.world_size not in environ:
            continue
        rank, world = number(environ, mpi.rank), number(environ, mpi.world_size)
        # Under `srun --mpi=pmi2` both say the same. Under mpirun in a Slurm job, SLURM_PROCID numbers mpirun's own
        # daemons.
        if step is not None and mpi.rank == "PMI_RANK" and (step.rank, step.world_size) == (rank, world):
            return step
        return Place(
            "mpirun",
            rank,
            world,
            number(environ, *mpi.local_rank, default=rank),
            number(environ, *mpi.local_world_size, default=world),
        )
    return step


def _step(environ: Environ) -> Place | None:
    """The place in a step of srun. A shell in an allocation has SLURM_NTASKS too, but is one process."""
    if "SLURM_PROCID" not in environ or environ.get("SLURM_STEP_ID", "4294967291") in _SHELLS:
        return None
    world = number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nodes = number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=1)
    return Place("srun", number(environ, "SLURM_PROCID"), world, number(environ, "SLURM_LOCALID"), -(-world // nodes))


def batch_tasks(environ: Environ) -> int:
    """How many tasks a Slurm batch script may start with srun, if this process was started without it; else 1."""
    in_script = "SLURM_PROCID" in environ and environ.get("SLURM_STEP_ID", "4294967291") == "4294967291"
    tasks = environ.get("SLURM_NTASKS", "")
    return int(tasks) if in_script and tasks.isdecimal() else 1


def number(environ: Environ, *names: str, default: int | None = None) -> int:
    """The number in the first of these variables that is set.

    Raises:
        ConfigError: It is no number, or none is set and there is no default.
    """
    name = next((name for name in names if name in environ), None)
    if name is None and default is not None:
        return default
    text = None if name is None else environ[name]
    try:
        return int(text or "")
    except ValueError:
        state = "is not set" if text is None else f"is {text!r}, not a number"
        message = f"the environment variable {name or names[-1]} {state}; start with torchrun, srun or python"
        raise ConfigError([Problem("", message)]) from None


def forgotten_srun(environ: Mapping[str, str] = os.environ) -> str | None:
    """A warning if a Slurm batch script with several tasks has started this process without srun; else None."""
    if (tasks := batch_tasks(environ)) == 1:
        return None
    return (
        f"this Slurm job has {tasks} tasks, but this script runs on one rank; to train on all of them, start it "
        "with srun"
    )


def restart_prefix(environ: Mapping[str, str] = os.environ) -> str:
    """A prefix for keys in the store of torchrun's agent, which outlives ranks that are started anew; empty where there
    is none.

    Only on one host: on several, the agents count the restarts apart (torch 2.13, elastic/agent/server/api.py).
    """
    if not has_one_agent(environ):
        return ""
    return f"life/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def has_one_agent(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun has started all ranks on one host."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and environ.get("GROUP_WORLD_SIZE") == "1"
