"""Where the ranks of a run meet: the address and the store of the launcher."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from unishard.config.launchers import MPI, number
from unishard.config.topology import Topology
from unishard.errors import ConfigError, Problem


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
            message = f"RANK and WORLD_SIZE are set, but not {' and '.join(absent)}"
            raise ConfigError(
                [
                    Problem(
                        "", f"the launcher's variables are incomplete: {message}; start with torchrun, srun or python"
                    )
                ]
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


def first_host(hosts: str) -> str:
    """The first host of a Slurm list such as `gpu[03-05,9],login1`."""
    name, number = re.match(r"([^\[,]*)(?:\[(\d+))?", hosts).groups(default="")  # type: ignore[union-attr]  # matches any text
    return f"{name}{number}"
