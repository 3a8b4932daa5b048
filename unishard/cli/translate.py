"""`unishard translate`: translate a config of any tool into another's, with a report on stderr."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from unishard.cli.arguments import GpusPerNode, Output, Overrides, Ranks, topology_of
from unishard.cli.completion import formats as read_formats
from unishard.cli.completion import written_formats
from unishard.cli.output import save
from unishard.cli.renamed_notes import collected
from unishard.cli.report import ReportForm, write_report
from unishard.cli.wrapping import echo, emit, report_width, wrapped
from unishard.contract.rules import Fit
from unishard.errors import ConfigError, Problem, UnishardError

if TYPE_CHECKING:
    from unishard.formats import Outcome
from unishard.cli.translate_request import TranslateRequest
from unishard.cli.verification_report import write_verification

APPROXIMATE = 2
"""Exit status under `--strict` when a key is only approximate."""
DIFFERENT = 2
"""Exit status under `--verify` when a difference is not reported."""
_REASONS = {
    1: (Fit.UNSUPPORTED, "refused (no equivalent)", "do what the note says, or drop the key (--drop KEY)"),
    APPROXIMATE: (Fit.APPROXIMATE, "only approximate, and strict is on", "change the key, or turn strict off"),
}


class Command(TyperCommand):
    """Refuses arguments behind `--`, which earlier versions read."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Say what to write instead of them."""
        if "--" in args:
            raise typer.BadParameter(
                "remove what is behind --, and give the command that trains in quotes: --with 'COMMAND'"
            )
        return super().parse_args(ctx, args)


def translate(
    ctx: typer.Context,
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="A config of any tool: YAML, JSON or TOML; or a directory.")
    ],
    to: Annotated[
        str,
        typer.Option(metavar="FORMAT", help="The format to write.", autocompletion=written_formats),
    ],
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
            help="Fill what IN leaves open from a config of Accelerate or DeepSpeed, TrainingArguments, or the one "
            "command that trains, in quotes.",
        ),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option("--drop", metavar="KEY", help="Leave out a key of IN; globs work. Repeatable."),
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
    llamafactory, trl; lightning is only read. Exits with 1 and writes nothing if a key has no equivalent; then it
    prints a command that works.

    Of a directory, it shows the format of each config, how it would translate, and the commands that do it: YAML, JSON
    and TOML files up to 1 MiB, except in virtual environments, node_modules and .git. TrainingArguments whose engine a
    launcher chooses are refused until --with or --set says it. Of another tool's file only DeepSpeed's config in it
    counts, or the one that it names. The last line counts all files: each translates, is refused, is another tool's,
    cannot be read, or is skipped.

    Example: unishard translate ds_config.json --to unishard -o cfg.yaml

    Example: unishard translate sft.yaml --to unishard --with 'accelerate launch --config_file zero3.yaml train.py'

    Example: unishard translate . --to unishard
    """
    from unishard import formats

    if source.is_dir():
        _look(source, to, report, ctx)
        return
    topology = topology_of(world_size, gpus_per_node)
    request = TranslateRequest(source, to, from_, topology, tuple(set_ or ()), tuple(drop or ()), output, with_)
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
        _verify(outcome)
    if output is None:
        emit(outcome.text, end="")
    else:
        save(output, outcome.text)


def _look(folder: Path, to: str, report: ReportForm, ctx: typer.Context) -> None:
    """Look at the configs of a directory.

    Raises:
        UnishardError: An option is for one config.
    """
    from unishard.cli.translate_folder import look

    for_any = {"source", "to", "report"} if report in (ReportForm.TEXT, ReportForm.JSON) else {"source", "to"}
    sources = {
        option.opts[0]: ctx.get_parameter_source(str(option.name))
        for option in ctx.command.params
        if option.name not in for_any
    }
    given = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    if given:
        raise UnishardError(
            f"{folder}: is a directory, whose configs are looked at and not translated; name one of them, or leave out "
            f"{' and '.join(given)}"
        )
    look(folder, to, as_json=report is ReportForm.JSON)


def _verify(outcome: Outcome) -> None:
    """Say what the tool that reads the result makes of it, and exit with 2 if the report does not say a difference."""
    from unishard.formats.verify import verify

    verification = verify(outcome)
    write_verification(verification, sys.stderr)
    if not verification.clean:
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
    items = outcome.of(fit)
    match form:
        case ReportForm.NONE:
            name = outcome.reading.source.name
            problems = [
                Problem(item.key, item.note or why, f"{name}:{item.line}" if item.line else name) for item in items
            ]
            echo(ConfigError(problems), err=True, laid_out=True)
        case ReportForm.TEXT | ReportForm.FULL:
            text = wrapped(f"nothing written: {len(items)} {why}; {instead}", report_width(sys.stderr), hanging="    ")
            echo(text, err=True, laid_out=True)
