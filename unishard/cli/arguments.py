"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unishard.cli.completion import changes, devices
from unishard.cli.wrapping import echo
from unishard.config.topology import Topology

if TYPE_CHECKING:
    from unishard.config import Config
    from unishard.config.run_ranks import RunRanks
    from unishard.tools.plan.devices import Device


ConfigFile = Annotated[Path, typer.Argument(metavar="CFG", help="A unishard config (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Override a field, such as training.seed=1. Repeatable.",
        autocompletion=changes,
    ),
]
ScriptName = Annotated[str, typer.Argument(metavar="SCRIPT", help="What each rank runs.")]
ScriptArguments = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Of the script.")]
ScriptIsModule = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")]
Ranks = Annotated[
    int | None,
    typer.Option("--world-size", min=1, metavar="N", help="Number of ranks. [default: from the file]"),
]
GpusPerNode = Annotated[int | None, typer.Option(min=1, metavar="M", help="Ranks per node. [default: all]")]
RanksPerNode = Annotated[
    int | None,
    typer.Option("--gpus-per-node", min=1, metavar="M", help="Ranks per node. [default: from the file]"),
]
DeviceName = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="What a rank computes on, such as h100-80g.", autocompletion=devices),
]
MemorySize = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Memory of a rank's device, such as 80GiB."),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Output file. [default: stdout]"),
]


def topology_of(ranks: int | None, per_node: int | None) -> Topology | None:
    """The topology given on the command line; None if there is none.

    Raises:
        typer.BadParameter: The ranks do not fill the nodes equally.
    """
    if ranks is None and per_node is None:
        return None
    ranks = ranks or per_node or 1
    per_node = per_node or ranks
    if ranks % per_node:
        raise typer.BadParameter(
            f"{ranks} ranks do not divide into nodes of {per_node}; give a --world-size that is a multiple of "
            f"{per_node}"
        )
    return Topology(ranks, per_node)


def run_ranks(cfg: Config, ranks: int | None, per_node: int | None) -> RunRanks:
    """The ranks of the command line, or else of the config.

    Raises:
        typer.BadParameter: The ranks do not fill the nodes equally.
        ConfigError: No number of ranks gives the global batch size.
    """
    from unishard.config.run_ranks import ranks_of

    topology_of(ranks, per_node)  # refuses what does not divide
    return ranks_of(cfg, ranks, per_node)


def disk_speed_of(text: str | None) -> int | None:
    """Bytes a second, of the option that says a disk's speed.

    Raises:
        ConfigError: It cannot be read.
    """
    from unishard.tools.plan.devices import parse_bytes

    return None if text is None else parse_bytes(text.strip().removesuffix("/s"), "--disk-speed")


def note_ranks(ranks: RunRanks) -> None:
    """Say on stderr for how many ranks the output is, unless an option has said it."""
    if not ranks.given:
        echo(f"note: for {ranks}" + ("" if ranks.origin else "; add --world-size N for more"), err=True)


def device_of(name: str | None, memory: str | None) -> Device | None:
    """The device of the options; the bandwidths of an H100 where only a memory is given.

    Raises:
        ConfigError: One cannot be read.
    """
    from unishard.tools.plan.devices import device_named, parse_bytes

    if name is None and memory is None:
        return None
    device = device_named(name or "h100-80g")
    return device if memory is None else device._replace(name=name or "", memory=parse_bytes(memory))
