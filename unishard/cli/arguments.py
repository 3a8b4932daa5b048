"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unishard.errors import ConfigError, Problem
from unishard.topology import Topology

__all__ = ["ConfigFile", "GpusPerNode", "Overrides", "WorldSize", "topology_of"]

ConfigFile = Annotated[Path, typer.Argument(metavar="CFG", help="A YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change a field, such as training.seed=1. May be repeated.", show_default=False),
]
WorldSize = Annotated[int, typer.Option(min=1, metavar="N", help="Number of ranks.")]
GpusPerNode = Annotated[int | None, typer.Option(min=1, metavar="M", help="Number of ranks on a node. [default: all]", show_default=False)]


def topology_of(world_size: int, gpus_per_node: int | None) -> Topology:
    """The ranks that a person asks about.

    Raises:
        ConfigError: The nodes would not be full.
    """
    local = gpus_per_node or world_size
    if world_size % local:
        raise ConfigError(
            [Problem("--gpus-per-node", f"{world_size} ranks do not fill nodes of {local}; choose a divisor of {world_size}")]
        )
    return Topology(world_size=world_size, local_world_size=local)
