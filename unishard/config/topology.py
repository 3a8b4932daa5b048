"""The number of ranks and this process's rank, from the launcher's environment.

Only this module reads the launcher's variables. Nothing else in unishard is configured through the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from unishard.errors import ConfigError, Problem

__all__ = ["Topology", "first_host", "rendezvous"]


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
    """What started the process: ``torchrun``, ``srun`` or ``python`` (a plain script, one rank)."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Topology:
        """Read the launcher's variables.

        torchrun (and every launcher that follows it) sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``;
        srun sets ``SLURM_PROCID``, ``SLURM_NTASKS``, ``SLURM_LOCALID`` and ``SLURM_NTASKS_PER_NODE``. With neither, this
        is a plain ``python script.py``: one rank.

        Raises:
            ConfigError: A variable is missing or is not a number.
        """
        if "RANK" in environ or "WORLD_SIZE" in environ:
            rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
            if not 0 <= rank < world:
                raise ConfigError([Problem("", f"RANK={rank} is invalid for WORLD_SIZE={world}; ranks are 0 to {world - 1}")])
            return cls(
                world_size=world,
                local_world_size=_number(environ, "LOCAL_WORLD_SIZE", default=world),
                rank=rank,
                local_rank=_number(environ, "LOCAL_RANK", default=rank),
                launcher="torchrun",
            )
        # An interactive allocation sets SLURM_NTASKS in the shell; only srun itself sets SLURM_STEP_ID beside SLURM_PROCID.
        if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
            world = _number(environ, "SLURM_STEP_NUM_TASKS", default=_number(environ, "SLURM_NTASKS"))
            nodes = _number(environ, "SLURM_STEP_NUM_NODES", default=_number(environ, "SLURM_NNODES", default=1))
            return cls(
                world_size=world,
                local_world_size=-(-world // nodes),
                rank=_number(environ, "SLURM_PROCID"),
                local_rank=_number(environ, "SLURM_LOCALID"),
                launcher="srun",
            )
        return cls()


def rendezvous(topology: Topology, environ: Mapping[str, str] = os.environ) -> str | None:
    """The `init_method` for `torch.distributed.init_process_group`; None for a single rank.

    torchrun sets `MASTER_ADDR` and `MASTER_PORT`. Under srun, where a job script need not set them, it is the step's
    first host and a port derived from the job ID.

    Raises:
        ConfigError: The launcher's variables are incomplete.
    """
    match topology.launcher:
        case "torchrun":
            if absent := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]:
                said = f"RANK and WORLD_SIZE are set, but not {' and '.join(absent)}"
                raise ConfigError([Problem("", f"the launcher's variables are incomplete: {said}; start with torchrun, srun or python")])
            return "env://"
        case "srun":
            hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "127.0.0.1"
            port = 20000 + _number(environ, "SLURM_JOB_ID", default=0) % 20000
            return f"tcp://{environ.get('MASTER_ADDR') or first_host(hosts)}:{environ.get('MASTER_PORT') or port}"
    return None


def first_host(hosts: str) -> str:
    """The first host of a Slurm list such as `gpu[03-05,9],login1`."""
    name, number = re.match(r"([^\[,]*)(?:\[(\d+))?", hosts).groups(default="")  # type: ignore[union-attr]  # matches any text
    return f"{name}{number}"


def _number(environ: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        found = "is not set" if text is None else f"is {text!r}, not a number"
        raise ConfigError([Problem("", f"the environment variable {name} {found}; start with torchrun, srun or python")]) from None
