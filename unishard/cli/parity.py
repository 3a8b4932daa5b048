"""`unishard parity`: whether a script still gives the losses and norms that it should."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unishard.cli import script_last, script_runs
from unishard.cli.arguments import ConfigFile, Overrides, ScriptArguments, ScriptIsModule, ScriptName
from unishard.cli.output import save
from unishard.cli.wrapping import echo, emit
from unishard.errors import BackendError, UnishardError

if TYPE_CHECKING:
    from unishard.tools.compare.candidates import Variant
    from unishard.tools.compare.golden import ComparedRun
    from unishard.tools.compare.measuring import Measured
from unishard.cli.differing_module import with_modules

Command = script_last.ScriptLast

DIFFERENT = 1
"""Exit status when values differ; 2 means an error."""


def parity(
    config: ConfigFile,
    script: ScriptName,
    arguments: ScriptArguments = None,
    module: ScriptIsModule = False,
    golden: Annotated[Path | None, typer.Option("--golden", metavar="FILE", help="Compare with this file.")] = None,
    write_golden: Annotated[
        Path | None,
        typer.Option("--write-golden", metavar="FILE", help="Write what CFG gives now."),
    ] = None,
    modules: Annotated[
        bool | None,
        typer.Option(
            "--modules/--no-modules",
            help="Find the first module that differs; with --write-golden, write all modules. [default: find, do not "
            "write]",
        ),
    ] = None,
    backends: script_runs.Backends = None,
    steps: script_runs.Steps = 20,
    processes_per_node: script_runs.Processes = None,
    set_: Overrides = None,
    timeout: script_runs.Timeout = 600,
    out: script_runs.Out = None,
    as_json: script_runs.AsJson = False,
) -> None:
    """Check that a script gives the same losses and norms.

    Runs CFG and compares with a golden file, or without one runs each engine and compares with the first. Exits with 0
    if all steps agree within the tolerances of the conformance suite, with 1 if not, after the first step that differs,
    the fields of the config that differ, and the first module that differs, for which it runs again up to that step.
    Exits with 2 on an error. The script must load its config with unishard.load(). Options stand before SCRIPT.

    Example: unishard parity cfg.yaml --golden losses.jsonl --steps 20 train.py --epochs 1
    """
    from unishard.tools.compare.candidates import candidates_of
    from unishard.tools.compare.golden import ComparedRun, facts_of, golden_text, read_golden
    from unishard.tools.compare.measuring import Task
    from unishard.tools.compare.records import Course
    from unishard.tools.compare.run_comparison import compare_runs, lines_of

    if golden is not None and write_golden is not None:
        raise UnishardError("--golden compares with a file and --write-golden writes one; give one of them")
    cfg, changes, _ = script_runs.given(config, set_, processes_per_node)
    expected = None if golden is None else read_golden(golden)
    one_engine = golden is not None or write_golden is not None
    rows = candidates_of(cfg, backends or (cfg.backend if one_engine else None), None)
    if one_engine and len(rows) > 1:
        raise UnishardError("--backends: a golden file is of one engine's run; give one")
    if not one_engine and len(rows) < 2:
        raise UnishardError("--backends: one engine has nothing to be compared with; give two, or --golden FILE")
    task = Task(config, script_runs.script_of(script, arguments, module), steps, timeout)
    if write_golden is not None and modules:
        task = task._replace(module_steps=tuple(range(1, steps + 1)))
    with script_runs.folder_of(out) as folder:
        measured = list(script_runs.run_all(cfg, task, rows, changes, folder))
        for row in measured:
            if row.failure:
                raise BackendError(f"{row.candidate}: {row.failure}")
        if write_golden is not None:
            save(write_golden, golden_text(measured[0].records, cfg, measured[0].modules))
            echo(f"{write_golden}: {len(measured[0].records)} steps written" + (", with modules" if modules else ""))
            return
        runs: list[ComparedRun] = [
            ComparedRun(str(row.candidate), Course.of(row.records), facts_of(cfg)) for row in measured
        ]
        pairs = [(run, expected or runs[0]) for run in (runs if expected else runs[1:])]
        comparisons = [compare_runs(one, other, cfg.precision.compute) for one, other in pairs]
        if modules is not False:

            def again(chosen: Sequence[Variant], steps: tuple[int, ...]) -> Iterable[Measured]:
                return script_runs.run_all(
                    cfg, task._replace(steps=steps[-1], module_steps=steps), chosen, changes, folder / "modules"
                )

            comparisons = list(with_modules(comparisons, rows, golden, cfg, again))
    if as_json:
        form: dict[str, Any] = {
            "same": all(comparison.same for comparison in comparisons),
            "comparisons": [comparison.as_json() for comparison in comparisons],
        }
        emit(json.dumps(form, indent=2))
    else:
        for comparison in comparisons:
            for line in lines_of(comparison):
                echo(line, laid_out=True)
    if not all(comparison.same for comparison in comparisons):
        raise typer.Exit(DIFFERENT)
