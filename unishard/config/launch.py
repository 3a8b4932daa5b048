"""How `unishard launch` starts the ranks. Training does not depend on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from unishard.config.section import Section

PORT = 29500
"""At which hosts meet where none is said, as in torchrun and Accelerate."""
_NODES = re.compile(r"[1-9]\d*(:[1-9]\d*)?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWN_OPTIONS = {
    "nodes": "launch.nodes",
    "N": "launch.nodes",
    "ntasks": "nothing",
    "ntasks-per-node": "nothing",
    "n": "nothing",
}
"""Options of sbatch that the written script decides, and what to set instead."""


class LaunchSettings(Section):
    """How `unishard launch` starts the ranks. It does not change training, and other launchers do not read it.

    `launch: 4` stands for `processes_per_node`.
    """

    shorthand: ClassVar[tuple[str, ...]] = ("processes_per_node",)

    nodes: int | str = Field(default=1)
    """Number of hosts. `"2:4"`: at least 2 and at most 4, and the run restarts on those that are left when one is gone;
    needs `max_restarts`."""
    processes_per_node: int | None = Field(default=None, ge=1)
    """Number of ranks on each host. `null`: one for each GPU, and one where there is none."""
    endpoint: str | None = Field(default=None)
    """`HOST:PORT` at which the hosts meet; the port is 29500 if omitted. Each host must reach it, and with `c10d` HOST
    is one of them, which must outlive the run. Slurm fills it in. `null`: only one host."""
    rendezvous: Literal["c10d", "static", "etcd-v2", "etcd"] = Field(default="c10d")
    """How the hosts meet, as torchrun's `--rdzv-backend`. `static` never restarts on fewer hosts, and needs
    `--node-rank` on each; `etcd` needs an etcd server at `endpoint`, which no lost host takes along."""
    rendezvous_id: str | None = Field(default=None)
    """A name of the run that all its hosts share. `null`: `unishard`, the job's ID under Slurm, and a random one on a
    single host."""
    rendezvous_options: dict[str, int | str] = Field(default={})
    """Further settings of the rendezvous, as torchrun's `--rdzv-conf`: `{join_timeout: 600, last_call_timeout: 30}`, in
    seconds."""
    max_restarts: int = Field(default=0, ge=0)
    """How often the ranks are started anew after one of them has failed or a host is gone. With
    `checkpoint.on_existing: resume` they resume from the newest complete checkpoint."""
    environment: dict[str, int | str] = Field(default={})
    """Environment variables of the ranks, such as `{NCCL_DEBUG: INFO}`. They are not saved in checkpoints."""
    slurm: dict[str, int | str] = Field(default={})
    """Options of the sbatch script that `--slurm` writes, by their long names:
    `{partition: gpu, gpus-per-node: 8, time: "4:00:00"}`. Two are commands of the script: `setup` runs before the ranks
    start (`module load cuda`), and `srun` adds arguments to srun."""

    @property
    def min_nodes(self) -> int:
        """The smallest number of hosts to train on."""
        return int(str(self.nodes).partition(":")[0])

    @property
    def max_nodes(self) -> int:
        """The largest number of hosts to train on."""
        return int(str(self.nodes).rpartition(":")[2])

    @field_validator("nodes")
    @classmethod
    def _check_nodes(cls, value: Any) -> Any:
        if not _NODES.fullmatch(str(value)) or (
            ":" in str(value) and int(value.partition(":")[0]) > int(value.rpartition(":")[2])
        ):
            example = 'write a number of at least 1, or "MIN:MAX" such as "2:4"'
            raise PydanticCustomError(
                "nodes", "{value} is no number of hosts; {example}", {"value": repr(value), "example": example}
            )
        return int(value) if ":" not in str(value) else value

    def _problems(self) -> Iterator[tuple[str, str]]:
        if self.endpoint is not None and not re.fullmatch(r"[^\s:]+(:\d+)?|\[[0-9A-Fa-f:]+\](:\d+)?", self.endpoint):
            yield "endpoint", f"{self.endpoint!r} is not HOST:PORT; write it as head.cluster:29500"
        if self.rendezvous == "static" and self.min_nodes != self.max_nodes:
            yield "rendezvous", "static starts a fixed number of hosts; write c10d, or one number as launch.nodes"
        for name in self.environment:
            if not _NAME.fullmatch(name):
                yield "environment", f"{name!r} is no name of a variable; write letters, digits and underscores"
        for name in self.slurm:
            if name in _OWN_OPTIONS:
                yield (
                    "slurm",
                    f"{name} follows from the other fields; "
                    + (
                        f"set {_OWN_OPTIONS[name]} instead"
                        if name in ("nodes", "N")
                        else "remove it: torchrun is the one task of each node"
                    ),
                )
            elif not re.fullmatch(r"[a-z][a-z-]*", name):
                yield "slurm", f"{name!r} is no long option of sbatch; write it as in gpus-per-node"
