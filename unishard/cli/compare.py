"""`unishard compare`: the same steps of a script on several engines and strategies."""

from __future__ import annotations

import json

import typer

from unishard.cli.arguments import ConfigFile, Overrides
from unishard.cli.script_last import ScriptLast
from unishard.cli.script_runs import (
    Arguments,
    AsJson,
    Backends,
    Module,
    Out,
    Processes,
    ScriptName,
    Steps,
    Strategies,
    Timeout,
    folder_of,
    given,
    run_all,
    script_of,
)

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command("compare", cls=ScriptLast)
def compare(
    config: ConfigFile,
    script: ScriptName,
    arguments: Arguments = None,
    module: Module = False,
    backends: Backends = None,
    strategies: Strategies = None,
    steps: Steps = 20,
    processes_per_node: Processes = None,
    set_: Overrides = None,
    timeout: Timeout = 600,
    out: Out = None,
    as_json: AsJson = False,
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

    cfg, changes = given(config, set_, processes_per_node)
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
