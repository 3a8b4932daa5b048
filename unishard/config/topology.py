"""The number of ranks and this process's rank, from the launcher's environment.

Only this module and `launchers` read the launcher's variables. Nothing else in unishard is configured through the
environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from unishard.config import launchers
from unishard.errors import ConfigError, Problem


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
        place = launchers.torchrun(environ) if "RANK" in environ else launchers.started_by(environ)
        if place is None:
            _refuse_unread(environ)
            return cls()
        if "WORLD_SIZE" in environ and launchers.number(environ, "WORLD_SIZE") != place.world_size:
            what = (
                f"WORLD_SIZE is {environ['WORLD_SIZE']}, but {place.launcher} has started {place.world_size} ranks; "
                "unset WORLD_SIZE"
            )
            raise ConfigError([Problem("", what)])
        return cls(place.world_size, place.local_world_size, place.rank, place.local_rank, place.launcher)


def _refuse_unread(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where variables say that this is one of several processes, but not which one of how many."""
    if "WORLD_SIZE" in environ:
        launchers.number(environ, "RANK")
    export = (
        "set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process, or start with torchrun or srun"
    )
    for name in launchers.UNSIZED:
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
        return f"tcp://{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "127.0.0.1"
    job, step = (
        launchers.number(environ, "SLURM_JOB_ID", default=0),
        launchers.number(environ, "SLURM_STEP_ID", default=0),
    )
    port = 20000 + (job + 7919 * step) % 20000  # two steps of a job may run at once
    return f"tcp://{environ.get('MASTER_ADDR') or first_host(hosts)}:{environ.get('MASTER_PORT') or port}"


def _address_for_mpi(topology: Topology, absent: list[str], environ: Mapping[str, str]) -> str:
    mpi = next(mpi for mpi in launchers.MPI if mpi.rank in environ)
    return (
        f"mpirun ({mpi.name}) has started {topology.world_size} ranks, which cannot find each other without "
        f"{' and '.join(absent)}; pass "
        f"on the host of rank 0 and a free port there: {mpi.start.format(n=topology.world_size)}"
    )


def forgotten_srun(environ: Mapping[str, str] = os.environ) -> str | None:
    """A warning if a Slurm batch script with several tasks has started this process without srun; else None."""
    if (tasks := launchers.batch_tasks(environ)) == 1:
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
        return host, int(port), False
    return (
        environ["MASTER_ADDR"],
        launchers.number(environ, "MASTER_PORT"),
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
