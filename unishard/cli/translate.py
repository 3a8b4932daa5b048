"""`unishard translate`: translate a config of any tool into another's, with a report on stderr."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from unishard.cli.arguments import GpusPerNode, Output, Overrides, Ranks, topology_of
from unishard.cli.completion import formats as read_formats
from unishard.cli.completion import written_formats
from unishard.cli.notes import collected
from unishard.cli.report import ReportForm, write_report
from unishard.cli.request import TranslateRequest
from unishard.cli.saving import save
from unishard.cli.wrapping import echo, emit, report_width, wrapped
from unishard.contract.rules import Fit
from unishard.errors import ConfigError, Problem

if TYPE_CHECKING:
    from unishard.formats import Outcome

APPROXIMATE = 2
"""Exit status under `--strict` when a key is only approximate."""
DIFFERENT = 2
"""Exit status under `--verify` when a difference is not reported."""
_REASONS = {
    1: (Fit.UNSUPPORTED, "refused (no equivalent)", "do what the note says, or drop the key (--drop KEY)"),
    APPROXIMATE: (Fit.APPROXIMATE, "only approximate, and strict is on", "change the key, or turn strict off"),
}


class Command(TyperCommand):
    """`--with -- --learning_rate 1e-4` means the arguments behind `--`, as without `--with`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave out a `--with` that names no file."""
        at = next((at for at, pair in enumerate(pairwise(args)) if pair == ("--with", "--")), None)
        return super().parse_args(ctx, args if at is None else [*args[:at], *args[at + 1 :]])


def translate(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="A config of any tool: YAML, JSON or TOML.", show_default=False)
    ],
    to: Annotated[
        str,
        typer.Option(metavar="FORMAT", help="The format to write.", show_default=False, autocompletion=written_formats),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGUMENTS", help="What the training script gets, as --with.", show_default=False),
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option("--from", metavar="FORMAT", help="Format of IN. [default: detected]", autocompletion=read_formats),
    ] = None,
    output: Output = None,
    world_size: Ranks = None,
    gpus_per_node: GpusPerNode = None,
    set_: Overrides = None,
    with_: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="FILE",
            help="Fill what IN leaves open from a launch script (train.sh), or TrainingArguments or Accelerate's "
            "config as YAML or JSON.",
            show_default=False,
        ),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(
            "--drop", metavar="KEY", help="Leave out a key of IN; globs work. Repeatable.", show_default=False
        ),
    ] = None,
    drop_unsupported: Annotated[
        bool, typer.Option("--drop-unsupported", help="Leave out every key without an equivalent.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Read the result with its own tool and compare; exit with 2 on an unreported difference."
        ),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 2 and write nothing if a key is only approximate.")
    ] = False,
    report: Annotated[ReportForm, typer.Option(help="Form of the report on stderr.")] = ReportForm.TEXT,
) -> None:
    """Translate a config of any tool into the format of another.

    Writes the result to stdout, and a report on each key to stderr. Formats: unishard, deepspeed, accelerate, hf,
    lightning, axolotl, llamafactory, swift, trl; composer and torchtitan are only read. Exits with 1 and writes nothing
    if a key has no equivalent; then it prints a command that works.

    Example: unishard translate ds_config.json --to unishard -o cfg.yaml

    Example: unishard translate ds_config.json --to unishard --with train.sh
    """
    from unishard import formats

    topology = topology_of(world_size, gpus_per_node)
    if arguments and with_ is not None:
        raise typer.BadParameter("give a file with --with, or arguments behind --, not both")
    beside = tuple(arguments) if arguments else with_
    request = TranslateRequest(source, to, from_, topology, tuple(set_ or ()), tuple(drop or ()), output, beside)
    with collected() as notes:
        outcome = request.translate(drop_unsupported=drop_unsupported)
    outcome = outcome._replace(warnings=(*outcome.warnings, *notes))
    write_report(outcome, report, sys.stderr)
    status = outcome.status(strict=strict or outcome.reading.config.strict)
    if status:
        _say(outcome, status, report)
        _say_what_works(request, outcome, report)
        raise typer.Exit(status)
    try:
        formats.check(outcome, topology)
    except ConfigError as error:
        echo(error, err=True)
        _say_what_works(request, outcome, report)
        raise typer.Exit(1) from None
    if verify:
        _verify(outcome, request)
    if output is None:
        emit(outcome.text, end="")
    else:
        save(output, outcome.text)


def _verify(outcome: Outcome, request: TranslateRequest) -> None:
    """Say what the tool that reads the result makes of it, and exit with 2 if the report does not say a difference."""
    from unishard.cli.verification import write_verification
    from unishard.formats.verify import verify

    found = verify(outcome, request.overrides)
    write_verification(found, sys.stderr)
    if not found.clean:
        raise typer.Exit(DIFFERENT)


def _say_what_works(request: TranslateRequest, outcome: Outcome, form: ReportForm) -> None:
    """Print a command that translates the rest of a refused file, or one that is not strict."""
    if form not in (ReportForm.NONE, ReportForm.TEXT, ReportForm.FULL):
        return
    if outcome.reading.config.strict:
        request = request._replace(overrides=(*request.overrides, "strict=false"))
    with collected():
        working = request.working()
    if working:
        echo(f"this works:\n{working.command()}", err=True, laid_out=True)


def _say(outcome: Outcome, status: int, form: ReportForm) -> None:
    """Say why nothing is written, unless the report did."""
    fit, why, instead = _REASONS[status]
    found = outcome.of(fit)
    match form:
        case ReportForm.NONE:
            name = outcome.reading.source.name
            problems = [
                Problem(item.key, item.note or why, f"{name}:{item.line}" if item.line else name) for item in found
            ]
            echo(ConfigError(problems), err=True, laid_out=True)
        case ReportForm.TEXT | ReportForm.FULL:
            said = wrapped(f"nothing written: {len(found)} {why}; {instead}", report_width(sys.stderr), hanging="    ")
            echo(said, err=True, laid_out=True)
