"""`unishard plan`: memory and traffic of every engine and strategy before a run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from unishard.cli import arguments, foreign_file
from unishard.cli.wrapping import echo, emit
from unishard.config.topology import Topology
from unishard.errors import ConfigError, Problem


def plan(
    config: arguments.ConfigFile,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Required: a local folder with config.json, or module:factory."),
    ] = None,
    world_size: arguments.Ranks = None,
    gpus_per_node: arguments.RanksPerNode = None,
    device: arguments.DeviceName = None,
    memory: arguments.MemorySize = None,
    disk_speed: Annotated[
        str | None,
        typer.Option("--disk-speed", metavar="SPEED", help="Of a node's disk for nvme, such as 3.5GB/s."),
    ] = None,
    seq_len: Annotated[int, typer.Option("--seq-len", min=1, metavar="T", help="Tokens of a sample.")] = 4096,
    no_activations: Annotated[
        bool, typer.Option("--no-activations", help="Only state and buffers; does not run the model.")
    ] = False,
    set_: arguments.Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a config needs before it runs.

    For each engine and strategy: bytes on one rank by what they are for, the peak and where it is, what travels within
    and between nodes, and what fits. Nothing is downloaded, and no GPU is needed.

    Example: unishard plan cfg.yaml --model ./llama --world-size 64 --gpus-per-node 8 --device h100-80g
    """
    from unishard.config.loading import read
    from unishard.tools.plan.model import PlannedModel
    from unishard.tools.plan.planning import make_plan

    if model is None:
        example = f"unishard plan {config} --model ./llama --world-size 8 --device h100-80g"
        needed = f"is missing; name a local folder with config.json, or module:factory, as in `{example}`"
        raise ConfigError([Problem("--model", needed)])
    target, disk = arguments.device_of(device, memory), arguments.disk_speed_of(disk_speed)
    with foreign_file.own_file(config):
        cfg, origins = read(config, set_ or ())
    try:
        ranks = arguments.run_ranks(cfg, world_size, gpus_per_node)
        topology = _on_nodes(ranks.topology, gpus_per_node or cfg.launch.processes_per_node)
        planned = make_plan(
            cfg,
            PlannedModel(model, cfg),
            topology,
            target,
            seq_len=seq_len,
            activations=not no_activations,
            disk_speed=disk,
        )
    except ConfigError as error:
        raise origins.locate(error) from None
    if as_json:
        emit(json.dumps(planned.as_json(), indent=2))
    else:
        from unishard.tools.plan.table import lines_of

        for line in lines_of(planned):
            echo(line, laid_out=True)
    arguments.note_ranks(ranks)


def _on_nodes(topology: Topology, per_node: int | None) -> Topology:
    """The ranks on nodes of 8, if nothing says how many a node has and they fill several."""
    if per_node is None and topology.world_size == topology.local_world_size > 8 and topology.world_size % 8 == 0:
        return Topology(topology.world_size, 8)
    return topology
