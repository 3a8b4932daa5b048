"""`unishard launch`: start the ranks of a script, or write or submit the job that does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from unishard.cli.arguments import ConfigFile, Overrides, ScriptArguments, ScriptIsModule, ScriptName
from unishard.cli.foreign_file import own_file
from unishard.cli.output import save
from unishard.cli.script_last import ScriptLast
from unishard.cli.wrapping import echo, emit
from unishard.config import Config
from unishard.errors import ConfigError, UnishardError

if TYPE_CHECKING:
    from unishard.tools.launch.command import Script

Command = ScriptLast


def launch(
    config: ConfigFile,
    script: ScriptName,
    arguments: ScriptArguments = None,
    module: ScriptIsModule = False,
    nodes: Annotated[str | None, typer.Option(metavar="N", help="Number of hosts, or MIN:MAX.")] = None,
    processes_per_node: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Ranks on each host. [default: one for each GPU]"),
    ] = None,
    endpoint: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where several hosts meet.")] = None,
    hostfile: Annotated[Path | None, typer.Option(metavar="FILE", help="Take these from DeepSpeed's hostfile.")] = None,
    node_rank: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="This host, with rendezvous: static.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Check first, for a few seconds, that several hosts reach each other."),
    ] = True,
    set_: Overrides = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit it as a Slurm job.")] = False,
    ray: Annotated[bool, typer.Option("--ray", help="Run it on Ray Train.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the job, and submit nothing."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and run nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, with --dry-run.")] = False,
) -> None:
    """Start the ranks of a script.

    The section `launch:` of the config says how many, and the script gets the config with unishard.load(). On this host
    torchrun starts them: Ctrl-C ends every rank, and the exit status is that of the rank that failed first. On several
    hosts, start the same command on each, or let Slurm or Ray do it: -o writes the job of Slurm to a file instead of
    submitting it.

    Options stand before SCRIPT; what follows it is passed to the script.

    Example: unishard launch cfg.yaml --processes-per-node 8 train.py --epochs 3
    """
    from unishard.config.loading import read
    from unishard.tools.launch.command import Script

    options = {"nodes": nodes, "processes_per_node": processes_per_node, "endpoint": endpoint}
    changes = [
        *_hosts(hostfile),
        *(set_ or []),
        *(f"launch.{name}={value}" for name, value in options.items() if value is not None),
    ]
    with own_file(config):
        cfg, origins = read(config, changes)
    request = LaunchRequest(
        config,
        cfg,
        Script(script, tuple(arguments or ()), module),
        [change for change in changes if not change.startswith("launch")],
    )
    systems = {"--slurm": slurm, "--ray": ray}
    _refuse_contradictions(systems, output, node_rank, dry_run=dry_run, as_json=as_json)
    try:
        if slurm:
            _slurm(request, output, dry_run=dry_run, as_json=as_json)
        elif ray:
            _ray(request, dry_run=dry_run)
        else:
            _local(request, node_rank, check=check, dry_run=dry_run, as_json=as_json)
    except ConfigError as error:
        raise origins.locate(error) from None


def _hosts(hostfile: Path | None) -> list[str]:
    if hostfile is None:
        return []
    from unishard.tools.launch.command import overrides_of

    return overrides_of(hostfile)


class LaunchRequest(NamedTuple):
    """What is to be started."""

    path: Path
    cfg: Config
    script: Script
    changes: list[str]
    """Overrides that are passed to the script."""

    @property
    def name(self) -> str:
        """Of a job."""
        return Path(self.script.name).stem if not self.script.module else self.script.name


def _refuse_contradictions(
    systems: Mapping[str, bool], output: Path | None, node_rank: int | None, *, dry_run: bool, as_json: bool
) -> None:
    """Refuse options that say nothing together.

    Raises:
        UnishardError: There are some.
    """
    chosen = [name for name, on in systems.items() if on]
    if len(chosen) > 1:
        raise UnishardError(f"{' and '.join(chosen)} are ways to start the ranks; give one")
    if as_json and not dry_run:
        raise UnishardError("--json describes what --dry-run prints; add --dry-run")
    if output and (not chosen or systems["--ray"]):
        raise UnishardError("-o writes the job of Slurm; add --slurm, or leave -o out")
    if node_rank is not None and chosen:
        raise UnishardError("--node-rank numbers this host, but the job system numbers its nodes; leave it out")


def _local(request: LaunchRequest, node_rank: int | None, *, check: bool, dry_run: bool, as_json: bool) -> None:
    from unishard.config.loading.launched import variables
    from unishard.tools.launch.command import Host, command_of, torchrun_program

    script, cfg = request.script, request.cfg
    _expect_script(script)
    host = Host(node_rank=node_rank, processes=None if cfg.launch.processes_per_node else _gpus())
    program = torchrun_program()
    command = command_of(cfg, script, variables(str(request.path.resolve()), request.changes), host, program=program)
    if dry_run:
        form = {"command": list(command.words), "environment": dict(command.environment), "line": command.line()}
        emit(json.dumps(form, indent=2) if as_json else command.line())
        return
    from unishard.tools.launch.running import run

    raise typer.Exit(run(command, cfg, len(program), check=check))


def _expect_script(script: Script) -> None:
    if not script.module and not Path(script.name).is_file():
        raise UnishardError(f"{script.name}: there is no such script; give its path, or -m with the name of a module")


def _ray(request: LaunchRequest, *, dry_run: bool) -> None:
    from unishard.config.loading.launched import variables
    from unishard.tools.launch.running import plan_for_ray, run_on_ray

    _expect_script(request.script)
    asked = plan_for_ray(request.cfg, request.script, variables(str(request.path.resolve()), request.changes))
    if dry_run:
        emit(json.dumps(asked, indent=2))
        return
    raise typer.Exit(run_on_ray(asked))


def _slurm(request: LaunchRequest, output: Path | None, *, dry_run: bool, as_json: bool) -> None:
    from unishard.config.loading.launched import variables
    from unishard.tools.launch.command import torchrun_program
    from unishard.tools.launch.slurm import batch_script, submit, unheard_signal

    if (unheard := unheard_signal(request.cfg)) is not None:
        echo(f"warning: {unheard}", err=True)
    environment = variables(str(request.path.resolve()), request.changes)
    text = batch_script(request.cfg, request.script, environment, request.name, program=torchrun_program())
    if dry_run:
        emit(json.dumps({"script": text}, indent=2) if as_json else text, end="\n" if as_json else "")
    elif output:
        save(output, text)
        echo(f"{output}: written; submit it with: sbatch {output}")
    else:
        echo(f"submitted job {submit(text)}")


def _gpus() -> str:
    """The number of GPUs of this host, at least 1."""
    from unishard.tools.launch.running import gpus

    return str(max(1, gpus()))
