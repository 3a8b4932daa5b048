"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unishard.config.topology import Topology

__all__ = ["ConfigFile", "GpusPerNode", "Output", "Overrides", "Ranks", "WorldSize", "topology_of"]

ConfigFile = Annotated[Path, typer.Argument(metavar="CFG", help="A YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change a field, such as training.seed=1. May be repeated.", show_default=False),
]
WorldSize = Annotated[int, typer.Option(min=1, metavar="N", help="Number of ranks.")]
Ranks = Annotated[
    int | None, typer.Option("--world-size", min=1, metavar="N", help="Number of ranks. [default: what the file says]", show_default=False)
]
GpusPerNode = Annotated[int | None, typer.Option(min=1, metavar="M", help="Ranks on one node. [default: all]", show_default=False)]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write there instead of to stdout.", show_default=False)
]


def topology_of(ranks: int | None, per_node: int | None) -> Topology | None:
    """The ranks that the command line speaks of; None if it speaks of none.

    Raises:
        typer.BadParameter: The nodes would not be equal.
    """
    if ranks is None and per_node is None:
        return None
    ranks = ranks or per_node or 1
    per_node = per_node or ranks
    if ranks % per_node:
        raise typer.BadParameter(f"{ranks} ranks cannot be {per_node} on each node; give a --world-size that {per_node} divides")
    return Topology(ranks, per_node)
