"""`unishard compare`: the same steps of a script on several engines and strategies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unishard.cli import golden as golden_runs
from unishard.cli import script_last, script_runs
from unishard.cli.arguments import ConfigFile, Overrides, ScriptArguments, ScriptIsModule
from unishard.cli.output import require_folder, save
from unishard.cli.wrapping import echo, emit
from unishard.errors import UnishardError

if TYPE_CHECKING:
    from unishard.tools.compare.measuring import Measured

Command = script_last.ScriptLast

_GOALS = {
    "--same": "compares with the first run",
    "--golden": "compares with a file",
    "--write-golden": "writes one",
}


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
    rounds: script_runs.Rounds = None,
    peak_tflops: Annotated[
        float | None,
        typer.Option("--peak-tflops", min=1e-6, metavar="N", help="Peak of one device, for MFU. [default: as known]"),
    ] = None,
    same: Annotated[
        bool, typer.Option("--same", help="Hold each run to the losses and norms of the first, instead of measuring.")
    ] = False,
    golden: Annotated[
        Path | None, typer.Option("--golden", metavar="FILE", help="Hold a run of CFG to those in this file.")
    ] = None,
    write_golden: Annotated[
        Path | None, typer.Option("--write-golden", metavar="FILE", help="Write what CFG gives now.")
    ] = None,
    modules: Annotated[
        bool | None,
        typer.Option(
            "--modules/--no-modules",
            help="Find the first module that differs; with --write-golden, write all modules. [default: find, do not "
            "write]",
        ),
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
    Options stand before SCRIPT. Exits with 2 on an error.

    With --same or --golden it exits with 0 if all steps agree within the tolerances of the conformance suite, and with
    1 if not, after the first step that differs, the fields of the config that differ, and the first module that
    differs, for which it runs again up to that step.

    Example: unishard compare cfg.yaml --strategies full_shard,shard_grad_op --steps 20 train.py --epochs 1

    Example: unishard compare cfg.yaml --golden losses.jsonl train.py
    """
    from unishard.tools.compare.candidates import candidates_of
    from unishard.tools.compare.golden import read_golden
    from unishard.tools.compare.measuring import Task
    from unishard.tools.compare.picture import require_matplotlib

    said = {"--same": same, "--golden": golden is not None, "--write-golden": write_golden is not None}
    goals = [name for name, given in said.items() if given]
    measures = {"--rounds": rounds, "--peak-tflops": peak_tflops, "--picture": picture}
    _refuse_contradictions(goals, [name for name, value in measures.items() if value is not None], modules)
    if picture is not None:
        require_matplotlib()
        require_folder(picture)
    cfg, changes, _ = script_runs.given(config, set_, processes_per_node)
    expected = None if golden is None else (golden, read_golden(golden))
    of_one = golden is not None or write_golden is not None
    rows = candidates_of(cfg, backends or (cfg.backend if of_one else None), strategies)
    if of_one and len(rows) > 1:
        raise UnishardError("--backends: a golden file is of one engine's run; give one")
    if same and len(rows) < 2:
        raise UnishardError("--backends: one engine has nothing to be compared with; give two, or --golden FILE")
    run = script_runs.script_or_model(script, arguments, module, model, seq_len)
    task = Task(config, run, steps, timeout, rounds=1 if goals else rounds or 2)
    with script_runs.folder_of(out) as folder:
        if write_golden is not None:
            task = task._replace(module_steps=tuple(range(1, steps + 1)) if modules else ())
            golden_runs.write(write_golden, cfg, task, rows, changes, folder, as_json=as_json)
        elif goals:
            found = golden_runs.hold(expected, cfg, task, rows, changes, folder, modules=modules is not False)
            golden_runs.report(found, as_json=as_json)
        else:
            measured = script_runs.run_all(cfg, task, rows, changes, folder)
            _show(measured, peak_tflops, picture, as_json=as_json)


def _refuse_contradictions(goals: Sequence[str], measures: Sequence[str], modules: bool | None) -> None:
    """Refuse options that say nothing together.

    Raises:
        UnishardError: There are some.
    """
    if len(goals) > 1:
        raise UnishardError(f"{' and '.join(f'{name} {_GOALS[name]}' for name in goals)}; give one of them")
    if goals and measures:
        raise UnishardError(f"{goals[0]} measures no times; leave out {' and '.join(measures)}")
    if modules is not None and not goals:
        raise UnishardError("--modules looks for what differs; add --same or --golden FILE, or leave it out")


def _show(measured: Sequence[Measured], peak_tflops: float | None, picture: Path | None, *, as_json: bool) -> None:
    """Write what was measured, and exit with 1 if every run has failed."""
    from unishard.tools.compare.picture import svg_of
    from unishard.tools.compare.table import distances, lines_of

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
