"""The options of `unishard compare` that say what is run, and the runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from unishard.cli.completion import backend_lists, strategy_lists
from unishard.cli.foreign_file import own_file
from unishard.cli.wrapping import echo
from unishard.config import Config
from unishard.errors import ConfigError, UnishardError

if TYPE_CHECKING:
    from unishard.config.loading.origins import Origins
    from unishard.tools.compare.candidates import ComparedRow
    from unishard.tools.compare.measuring import Measured, Task
    from unishard.tools.launch.command import Script


OptionalScript = Annotated[
    str | None,
    typer.Argument(metavar="SCRIPT", help="What each rank runs; random data if only --model is given."),
]
ModelName = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="A local folder with config.json, or module:factory."),
]
SeqLen = Annotated[int, typer.Option("--seq-len", min=1, metavar="T", help="Tokens of a sample, with --model.")]
Backends = Annotated[
    str | None,
    typer.Option(
        "--backends", metavar="A,B", help="Engines. [default: all installed, CFG's first]", autocompletion=backend_lists
    ),
]
Strategies = Annotated[
    str | None,
    typer.Option(
        "--strategies", metavar="A,B", help="Strategies. [default: that of CFG]", autocompletion=strategy_lists
    ),
]
Steps = Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Optimizer steps of each run.")]
Rounds = Annotated[
    int | None,
    typer.Option("--rounds", min=1, metavar="N", help="How often each candidate runs, in turns. [default: 2]"),
]
Processes = Annotated[
    int | None,
    typer.Option("--processes-per-node", min=1, metavar="N", help="Ranks. [default: one for each GPU]"),
]
Timeout = Annotated[float, typer.Option("--timeout", min=1, metavar="SECONDS", help="For one run.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Keep logs and output of each run here.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class OverriddenConfig(NamedTuple):
    """A config with the overrides of the command line."""

    cfg: Config
    changes: list[str]
    """The overrides."""
    origins: Origins
    """Where each value comes from."""


def given(config: Path, set_: Sequence[str] | None, processes_per_node: int | None) -> OverriddenConfig:
    """Read the config.

    Raises:
        ConfigError: It has errors.
    """
    from unishard.config.loading import read

    changes = [*(set_ or []), *([f"launch.processes_per_node={processes_per_node}"] if processes_per_node else [])]
    with own_file(config):
        cfg, origins = read(config, changes)
    return OverriddenConfig(cfg, changes, origins)


def script_or_model(
    name: str | None, arguments: Sequence[str] | None, module: bool, model: str | None, seq_len: int
) -> Script:
    """The script of the command line, or without one the model on random data.

    Raises:
        UnishardError: There is neither.
    """
    from unishard.tools.launch.command import Script

    if name is not None:
        if not module and not Path(name).is_file():
            raise UnishardError(f"{name}: there is no such script; give its path, or -m with the name of a module")
        return Script(name, tuple(arguments or ()), module)
    if model is None:
        raise UnishardError("there is nothing to run; give SCRIPT, or --model MODEL for random data")
    return Script("unishard.tools.compare.random_data", (model, "--seq-len", str(seq_len)), module=True)


@contextmanager
def folder_of(out: Path | None) -> Iterator[Path]:
    """The folder for the runs: the one given, or one that is removed in the end."""
    if out is not None:
        yield out.absolute()
    else:
        with tempfile.TemporaryDirectory(prefix="unishard-compare-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)


def run_all(
    cfg: Config, task: Task, rows: Sequence[ComparedRow], changes: Sequence[str], folder: Path
) -> list[Measured]:
    """Measure the candidates in turns: A B, then B A.

    One whose config is refused is a failed row, and one that has failed rests.

    Args:
        cfg: The config.
        task: What is common to all.
        rows: The candidates.
        changes: The user's overrides.
        folder: For their files.
    """
    from unishard.tools.compare.measuring import in_turns

    turns = in_turns(len(rows), task.rounds)
    measurements: dict[int, Measured] = {}
    for number, (at, turn) in enumerate(turns, 1):
        if at in measurements and measurements[at].failure:
            continue
        echo(f"{number}/{len(turns)} {rows[at]}", err=True)
        measured = _measured(
            cfg, task, rows[at], changes, folder / (rows[at].folder + (f"-{turn + 1}" if turn else ""))
        )
        measurements[at] = measured if at not in measurements else measurements[at].again(measured)
    return [measurements[at] for at in range(len(rows))]


def _measured(cfg: Config, task: Task, row: ComparedRow, changes: Sequence[str], folder: Path) -> Measured:
    from unishard.config.loading import load
    from unishard.tools.compare.candidates import overrides_of
    from unishard.tools.compare.measuring import Measured, measure

    overrides = overrides_of(cfg, row, folder, changes, task.module_steps)
    try:
        load(task.config, overrides)
    except ConfigError as error:
        return Measured(row, failure=str(error).splitlines()[0])
    return measure(task, row, overrides, folder)
