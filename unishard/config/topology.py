"""The number of ranks and this process's rank, from the launcher's environment.

Only this module, `launchers` and `rendezvous` read the launcher's variables. Nothing else in unishard is configured
through the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from unishard.config.launchers import UNSIZED, number, started_by, torchrun
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
        place = torchrun(environ) if "RANK" in environ else started_by(environ)
        if place is None:
            _refuse_unread(environ)
            return cls()
        if "WORLD_SIZE" in environ and number(environ, "WORLD_SIZE") != place.world_size:
            message = (
                f"WORLD_SIZE is {environ['WORLD_SIZE']}, but {place.launcher} has started {place.world_size} ranks; "
                "unset WORLD_SIZE"
            )
            raise ConfigError([Problem("", message)])
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
            message = (
                f"{name}={environ[name]} says that a launcher has started this process, but not how many there are; "
                f"{export}"
            )
            raise ConfigError([Problem("", f"{message}; for a single rank, unset {name}")])
    # Accelerate 1.15, utils/launch.py: with several processes and no GPUs it starts one script, and sets only the
    # address.
    if "ACCELERATE_MIXED_PRECISION" in environ and "MASTER_ADDR" in environ:
        message = (
            "accelerate launch has set MASTER_ADDR but no RANK: on the CPU it starts one process whatever "
            "--num_processes says; start with torchrun --nproc-per-node N, or for a single rank with python"
        )
        raise ConfigError([Problem("", message)])
