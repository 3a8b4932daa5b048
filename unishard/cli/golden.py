"""`unishard compare` with `--same`, `--golden` or `--write-golden`: the losses and norms that a script should give."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from unishard.cli import script_runs
from unishard.cli.differing_module import with_modules
from unishard.cli.output import save
from unishard.cli.wrapping import echo, emit
from unishard.config import Config
from unishard.errors import BackendError

if TYPE_CHECKING:
    from unishard.tools.compare.candidates import Variant
    from unishard.tools.compare.golden import ComparedRun
    from unishard.tools.compare.measuring import Measured, Task
    from unishard.tools.compare.run_comparison import RunComparison

DIFFERENT = 1
"""Exit status when values differ; 2 means an error."""


def write(
    path: Path, cfg: Config, task: Task, rows: Sequence[Variant], changes: list[str], folder: Path, *, as_json: bool
) -> None:
    """Run the only candidate, write what it gives, and say so.

    Raises:
        BackendError: The run fails.
    """
    from unishard.tools.compare.golden import golden_text

    (measured,) = _run(cfg, task, rows, changes, folder)
    save(path, golden_text(measured.records, cfg, measured.modules))
    steps, modules = len(measured.records), bool(task.module_steps)
    if as_json:
        emit(json.dumps({"golden": str(path), "steps": steps, "modules": modules}, indent=2))
    else:
        echo(f"{path}: {steps} steps written" + (", with modules" if modules else ""))


def hold(
    golden: tuple[Path, ComparedRun] | None,
    cfg: Config,
    task: Task,
    rows: Sequence[Variant],
    changes: list[str],
    folder: Path,
    *,
    modules: bool,
) -> list[RunComparison]:
    """Run the candidates, and compare them.

    Args:
        golden: A golden file and what it holds; None to compare with the first candidate.
        cfg: The config.
        task: What is common to all.
        rows: The candidates.
        changes: The user's overrides.
        folder: For their files.
        modules: Whether to run what differs again, and find the first module that does.

    Raises:
        BackendError: A run fails.
    """
    from unishard.tools.compare.golden import ComparedRun, facts_of
    from unishard.tools.compare.records import Course
    from unishard.tools.compare.run_comparison import compare_runs

    measured = _run(cfg, task, rows, changes, folder)
    runs = [ComparedRun(str(row.candidate), Course.of(row.records), facts_of(cfg)) for row in measured]
    pairs = [(run, golden[1] if golden else runs[0]) for run in (runs if golden else runs[1:])]
    comparisons = [compare_runs(one, other, cfg.precision.compute) for one, other in pairs]
    if not modules:
        return comparisons

    def again(chosen: Sequence[Variant], steps: tuple[int, ...]) -> Iterable[Measured]:
        return script_runs.run_all(
            cfg, task._replace(steps=steps[-1], module_steps=steps), chosen, changes, folder / "modules"
        )

    return list(with_modules(comparisons, rows, golden and golden[0], cfg, again))


def _run(cfg: Config, task: Task, rows: Sequence[Variant], changes: list[str], folder: Path) -> list[Measured]:
    measured = script_runs.run_all(cfg, task, rows, changes, folder)
    for row in measured:
        if row.failure:
            raise BackendError(f"{row.candidate}: {row.failure}")
    return measured


def report(comparisons: Sequence[RunComparison], *, as_json: bool) -> None:
    """Say what is the same and what differs, and exit with 1 if something does."""
    from unishard.tools.compare.run_comparison import lines_of

    same = all(comparison.same for comparison in comparisons)
    if as_json:
        form: dict[str, Any] = {"same": same, "comparisons": [comparison.as_json() for comparison in comparisons]}
        emit(json.dumps(form, indent=2))
    else:
        for comparison in comparisons:
            for line in lines_of(comparison):
                echo(line, laid_out=True)
    if not same:
        raise typer.Exit(DIFFERENT)
