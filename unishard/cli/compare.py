"""`unishard compare`: the same steps of a script on several engines and strategies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from unishard.cli import script_last, script_runs
from unishard.cli.arguments import ConfigFile, Overrides, ScriptArguments, ScriptIsModule
from unishard.cli.output import require_folder, save
from unishard.cli.wrapping import echo, emit

Command = script_last.ScriptLast


def compare(
    config: ConfigFile,
    script: script_runs.OptionalScript = None,
    arguments: ScriptArguments = None,
    module: ScriptIsModule = False,
    model: script_runs.ModelName = None,
    seq_len: script_runs.SeqLen = 4096,
    backends: script_runs.Backends = None,
    strategies: script_runs.Strategies = None,
    steps: script_runs.Steps = 20,
    rounds: script_runs.Rounds = 2,
    peak_tflops: Annotated[
        float | None,
        typer.Option("--peak-tflops", min=1e-6, metavar="N", help="Peak of one device, for MFU. [default: as known]"),
    ] = None,
    processes_per_node: script_runs.Processes = None,
    set_: Overrides = None,
    timeout: script_runs.Timeout = 600,
    out: script_runs.Out = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="Draw losses and step times, as SVG.")
    ] = None,
    as_json: script_runs.AsJson = False,
) -> None:
    """Measure a script on each engine and strategy.

    The same steps are run on this host, in turns: forth in the first round, back in the second. For each: the median
    time of a step without the first 3, throughput, TFLOP/s, MFU, the memory of the rank that holds most, what a rank
    sends, the time until the first step is done, and the largest relative difference of losses and gradient norms from
    the first row. The script must load its config with unishard.load(); --model without a script runs on random data.
    Options stand before SCRIPT.

    Example: unishard compare cfg.yaml --strategies full_shard,shard_grad_op --steps 20 train.py --epochs 1
    """
    from unishard.tools.compare.candidates import candidates_of
    from unishard.tools.compare.measuring import Task
    from unishard.tools.compare.picture import require_matplotlib, svg_of
    from unishard.tools.compare.table import distances, lines_of

    if picture is not None:
        require_matplotlib()
        require_folder(picture)
    cfg, changes, _ = script_runs.given(config, set_, processes_per_node)
    rows = candidates_of(cfg, backends, strategies)
    task = Task(
        config, script_runs.script_or_model(script, arguments, module, model, seq_len), steps, timeout, rounds=rounds
    )
    with script_runs.folder_of(out) as folder:
        measured = script_runs.run_all(cfg, task, rows, changes, folder)
    if as_json:
        pairs = zip(measured, distances(measured), strict=True)
        form = {"candidates": [row.as_json(peak_tflops) | {"distance": far and far._asdict()} for row, far in pairs]}
        emit(json.dumps(form, indent=2))
    else:
        for line in lines_of(measured, peak_tflops):
            echo(line, laid_out=True)
    if picture is not None:
        save(picture, svg_of(measured))
        echo(f"{picture}: written", err=True)
    if all(row.failure for row in measured):
        raise typer.Exit(1)
