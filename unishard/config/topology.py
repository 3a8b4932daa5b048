"""The number of ranks and this process's rank, from the launcher's environment.

Only this module and `launchers` read the launcher's variables. Nothing else in unishard is configured through the
environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from unishard.errors import ConfigError, Problem

# -- The environment variables by which launchers number the processes that they start -------------

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
        found = "is not set" if text is None else f"is {text!r}, not a number"
        what = f"the environment variable {name or names[-1]} {found}; start with torchrun, srun or python"
        raise ConfigError([Problem("", what)]) from None


@dataclass(frozen=True, slots=True)
class Topology:
    """The position of this process in the run."""

    world_size: int = 1
    """Number of ranks in the whole run."""
    local_world_size: int = 1
    """Number of ranks on this node."""
    rank: int = 0
    """This process, from 0 to ``world_size - 1``."""
    local_rank: int = 0
    """This process on its node, from 0 to ``local_world_size - 1``."""
    launcher: str = "python"
    """What started the process: ``torchrun`` (or a launcher that sets the same variables), ``srun``, ``mpirun`` or
    ``python`` (a plain script, one rank)."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Topology:
        """Read the launcher's variables.

        torchrun, ``accelerate launch`` and DeepSpeed's launcher set ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``; they
        come first. Then those of MPI launchers (``OMPI_COMM_WORLD_RANK``, ``PMI_RANK``, ...), then srun's
        (``SLURM_PROCID``, ...). With none, this is a plain ``python script.py``: one rank. So is a script in the shell
        of a Slurm allocation. docs/clusters.md lists them all.

        Raises:
            ConfigError: A variable is missing or is not a number, or a launcher that started several processes cannot
                be read.
        """
        place = torchrun(environ) if "RANK" in environ else started_by(environ)
        if place is None:
            _refuse_unread(environ)
            return cls()
        if "WORLD_SIZE" in environ and number(environ, "WORLD_SIZE") != place.world_size:
            what = (
                f"WORLD_SIZE is {environ['WORLD_SIZE']}, but {place.launcher} has started {place.world_size} ranks; "
                "unset WORLD_SIZE"
            )
            raise ConfigError([Problem("", what)])
        return cls(place.world_size, place.local_world_size, place.rank, place.local_rank, place.launcher)


def _refuse_unread(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where variables say that this is one of several processes, but not which one of how many."""
    if "WORLD_SIZE" in environ:
        number(environ, "RANK")
    export = (
        "set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process, or start with torchrun or srun"
    )
    for name in UNSIZED:
        if name in environ:
            what = (
                f"{name}={environ[name]} says that a launcher has started this process, but not how many there are; "
                f"{export}"
            )
            raise ConfigError([Problem("", f"{what}; for a single rank, unset {name}")])
    # Accelerate 1.15, utils/launch.py: with several processes and no GPUs it starts one script, and sets only the
    # address.
    if "ACCELERATE_MIXED_PRECISION" in environ and "MASTER_ADDR" in environ:
        what = (
            "accelerate launch has set MASTER_ADDR but no RANK: on the CPU it starts one process whatever "
            "--num_processes says; start with torchrun --nproc-per-node N, or for a single rank with python"
        )
        raise ConfigError([Problem("", what)])


def rendezvous(topology: Topology, environ: Mapping[str, str] = os.environ) -> str | None:
    """The `init_method` for `torch.distributed.init_process_group`; None for a single rank.

    torchrun sets `MASTER_ADDR` and `MASTER_PORT`. Under srun, where a job script need not set them, it is the step's
    first host and a port derived from the job ID and the step. mpirun has no such address: the two must be passed on.

    Raises:
        ConfigError: The launcher's variables are incomplete.
    """
    absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if topology.launcher == "torchrun":
        if absent:
            said = f"RANK and WORLD_SIZE are set, but not {' and '.join(absent)}"
            raise ConfigError(
                [Problem("", f"the launcher's variables are incomplete: {said}; start with torchrun, srun or python")]
            )
        return "env://"
    if topology.world_size == 1:
        return None
    if topology.launcher == "mpirun":
        if absent:
            raise ConfigError([Problem("", _address_for_mpi(topology, absent, environ))])
        return _tcp(environ["MASTER_ADDR"], environ["MASTER_PORT"])
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "127.0.0.1"
    job, step = (
        number(environ, "SLURM_JOB_ID", default=0),
        number(environ, "SLURM_STEP_ID", default=0),
    )
    port = 20000 + (job + 7919 * step) % 20000  # two steps of a job may run at once
    return _tcp(environ.get("MASTER_ADDR") or first_host(hosts), environ.get("MASTER_PORT") or str(port))


def _tcp(host: str, port: str) -> str:
    """The `init_method` of an address; one of IPv6 is in brackets, as in other URLs."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _address_for_mpi(topology: Topology, absent: list[str], environ: Mapping[str, str]) -> str:
    mpi = next(mpi for mpi in MPI if mpi.rank in environ)
    return (
        f"mpirun ({mpi.name}) has started {topology.world_size} ranks, which cannot find each other without "
        f"{' and '.join(absent)}; pass "
        f"on the host of rank 0 and a free port there: {mpi.start.format(n=topology.world_size)}"
    )


def forgotten_srun(environ: Mapping[str, str] = os.environ) -> str | None:
    """A warning if a Slurm batch script with several tasks has started this process without srun; else None."""
    if (tasks := batch_tasks(environ)) == 1:
        return None
    return (
        f"this Slurm job has {tasks} tasks, but this script runs on one rank; to train on all of them, start it "
        "with srun"
    )


def store_of_launcher(method: str, environ: Mapping[str, str] = os.environ) -> tuple[str, int, bool]:
    """Host and port of the store for an `init_method` of `rendezvous`, and whether the launcher serves it, as
    torchrun's agent does.
    """
    if method != "env://":
        host, _, port = method.removeprefix("tcp://").rpartition(":")
        return host.strip("[]"), int(port), False
    return (
        environ["MASTER_ADDR"],
        number(environ, "MASTER_PORT"),
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def life(environ: Mapping[str, str] = os.environ) -> str:
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


def first_host(hosts: str) -> str:
    """The first host of a Slurm list such as `gpu[03-05,9],login1`."""
    name, number = re.match(r"([^\[,]*)(?:\[(\d+))?", hosts).groups(default="")  # type: ignore[union-attr]  # matches any text
    return f"{name}{number}"
