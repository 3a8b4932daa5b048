"""`unishard compare`: the same steps of a script on several engines and strategies."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unishard.cli.arguments import ConfigFile, Overrides
from unishard.cli.checkpoint_formats import own_file
from unishard.cli.script_last import ScriptLast
from unishard.cli.wrapping import echo
from unishard.config import Config
from unishard.errors import ConfigError, UnishardError

if TYPE_CHECKING:
    from unishard.compare.candidates import Variant
    from unishard.compare.measuring import Measured, Task
    from unishard.launch.command import Script

__all__ = ["Backends", "Module", "Out", "Processes", "Steps", "Timeout", "app", "folder_of", "run_all", "script_of"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

Backends = Annotated[
    str | None, typer.Option("--backends", metavar="A,B", help="Engines. [default: all installed, CFG's first]", show_default=False)
]
Steps = Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Optimizer steps of each run.")]
Processes = Annotated[
    int | None, typer.Option("--processes-per-node", min=1, metavar="N", help="Ranks. [default: one for each GPU]", show_default=False)
]
Module = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")]
Timeout = Annotated[float, typer.Option("--timeout", min=1, metavar="SECONDS", help="For one run.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Keep logs and output of each run here.", show_default=False)]


@app.command("compare", cls=ScriptLast)
def compare(
    config: ConfigFile,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="What each rank runs.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Of the script.", show_default=False)] = None,
    module: Module = False,
    backends: Backends = None,
    strategies: Annotated[
        str | None, typer.Option("--strategies", metavar="A,B", help="Strategies. [default: that of CFG]", show_default=False)
    ] = None,
    steps: Steps = 20,
    processes_per_node: Processes = None,
    set_: Overrides = None,
    timeout: Timeout = 600,
    out: Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a script on each engine and strategy.

    The same steps are run one after another on this host. For each: the median time of a step without the first 3, throughput, the
    memory of the rank that holds most, the time until the first step is done, and the largest relative difference of losses and gradient
    norms from the first row. The script must load its config with unishard.load(). Options stand before SCRIPT.

    Example: unishard compare cfg.yaml --strategies full_shard,shard_grad_op --steps 20 train.py --epochs 1
    """
    from unishard.compare.candidates import candidates_of
    from unishard.compare.measuring import Task
    from unishard.compare.text import distances, lines_of
    from unishard.loading import read

    changes = [*(set_ or []), *([f"launch.processes_per_node={processes_per_node}"] if processes_per_node else [])]
    with own_file(config):
        cfg, _ = read(config, changes)
    rows = candidates_of(cfg, backends, strategies)
    task = Task(config, script_of(script, arguments, module), steps, timeout)
    with folder_of(out) as folder:
        found = list(run_all(cfg, task, rows, changes, folder))
    if as_json:
        pairs = zip(found, distances(found), strict=True)
        typer.echo(json.dumps({"candidates": [row.as_json() | {"distance": far and far._asdict()} for row, far in pairs]}, indent=2))
    else:
        for line in lines_of(found):
            typer.echo(line)
    if all(row.failure for row in found):
        raise typer.Exit(1)


def script_of(name: str, arguments: Sequence[str] | None, module: bool) -> Script:
    """The script of the command line.

    Raises:
        UnishardError: There is none.
    """
    from unishard.launch.command import Script

    if not module and not Path(name).is_file():
        raise UnishardError(f"{name}: there is no such script; give its path, or -m with the name of a module")
    return Script(name, tuple(arguments or ()), module)


@contextmanager
def folder_of(out: Path | None) -> Iterator[Path]:
    """The folder for the runs: the one given, or one that is removed in the end."""
    if out is not None:
        yield out.absolute()
    else:
        with tempfile.TemporaryDirectory(prefix="unishard-compare-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)


def run_all(cfg: Config, task: Task, rows: Sequence[Variant], changes: Sequence[str], folder: Path) -> Iterator[Measured]:
    """Measure the candidates one after another. One whose config is refused is a failed row."""
    from unishard.compare.candidates import overrides_of
    from unishard.compare.measuring import Measured, measure
    from unishard.loading import load

    for number, row in enumerate(rows, 1):
        echo(f"{number}/{len(rows)} {row}", err=True)
        own = folder / f"{row.backend}-{row.strategy}"
        overrides = overrides_of(cfg, row, own, changes)
        try:
            load(task.config, overrides)
        except ConfigError as error:
            yield Measured(row, failure=str(error).splitlines()[0])
        else:
            yield measure(task, row, overrides, own)
