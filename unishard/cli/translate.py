"""`unishard translate`: translate a config of any tool into another's, with a report on stderr."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TextIO

import typer
from typer.core import TyperCommand

from unishard.cli.arguments import GpusPerNode, Output, Overrides, Ranks, topology_of
from unishard.cli.completion import formats as read_formats
from unishard.cli.completion import written_formats
from unishard.cli.output import save
from unishard.cli.renamed_notes import collected
from unishard.cli.report import ReportForm, write_report
from unishard.cli.wrapping import echo, emit, report_width, shell_lines, wrapped
from unishard.config.describe import bare
from unishard.config.topology import Topology
from unishard.contract.rules import Fit
from unishard.errors import ConfigError, Problem

if TYPE_CHECKING:
    from unishard.formats import Outcome
    from unishard.formats.remedies import Remedy
    from unishard.formats.verify import Verification
    from unishard.formats.verify.comparing import ComparedSetting


# -- What a `unishard translate` command asks for, and the command that asks for something else ----


class TranslateRequest(NamedTuple):
    """The arguments of one translation."""

    source: Path
    to: str
    from_: str | None = None
    topology: Topology | None = None
    overrides: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    output: Path | None = None
    with_: str | None = None

    def translate(self, *, drop_unsupported: bool = False) -> Outcome:
        """Translate; with `drop_unsupported`, without the keys that are refused, if that helps.

        Raises:
            ConfigError: The file cannot be read, is in no known format, or an override cannot be used.
        """
        from unishard.formats import translate

        found = self._remedy(only_drop=True) if drop_unsupported else None
        outcome = (
            found.outcome
            if found
            else translate(
                self.source,
                self.to,
                from_=self.from_,
                overrides=self.overrides,
                topology=self.topology,
                drop=self.drop,
                with_=self.with_,
            )
        )
        return self._with_effects(outcome) if outcome.dropped else outcome

    def _with_effects(self, outcome: Outcome) -> Outcome:
        from unishard.formats import read
        from unishard.formats.drop_effects import with_effects

        try:
            whole = read(self.source, self.from_, (), self.topology)
        except ConfigError:
            return outcome  # only without these keys does it say anything
        return with_effects(outcome, whole)

    def working(self) -> TranslateRequest | None:
        """The nearest request in which nothing is refused; None if there is none."""
        found = self._remedy(only_drop=False)
        if found is None:
            return None
        changed = {text.partition("=")[0] for text in found.overrides}
        kept = (text for text in self.overrides if text.partition("=")[0].strip() not in changed)
        return self._replace(overrides=(*kept, *found.overrides), drop=(*self.drop, *found.drop))

    def _remedy(self, *, only_drop: bool) -> Remedy | None:
        from unishard.formats.remedies import remedy
        from unishard.formats.source import open_source

        return remedy(
            open_source(self.source),
            self.to,
            from_=self.from_,
            overrides=self.overrides,
            topology=self.topology,
            drop=self.drop,
            with_=self.with_,
            only_drop=only_drop,
        )

    def command(self) -> str:
        """The command to paste into a shell."""
        return shell_lines(map(shlex.quote, ("unishard", "translate", str(self.source), *self._options())))

    def _options(self) -> Iterator[str]:
        yield from ("--to", self.to)
        if self.from_:
            yield from ("--from", self.from_)
        if self.output:
            yield from ("--output", str(self.output))
        if self.topology:
            yield from ("--world-size", str(self.topology.world_size))
            if self.topology.local_world_size != self.topology.world_size:
                yield from ("--gpus-per-node", str(self.topology.local_world_size))
        if self.with_:
            yield from ("--with", self.with_)
        for option, values in (("--set", self.overrides), ("--drop", self.drop)):
            for value in values:
                yield from (option, value)


# -- Write what `--verify` found -------------------------------------------------------------------


def write_verification(found: Verification, file: TextIO) -> None:
    """Write the settings and the result to a stream: what all agree on once, and what differs with each side's
    value.
    """
    width, longest = report_width(file), max((len(row.field) for row in found.rows), default=0)
    for row in found.rows:
        file.write(wrapped(f"{row.field.ljust(longest)}  {_said(row)}", width, hanging=" " * (longest + 2)) + "\n")
    for line in _closing(found):
        file.write(wrapped(line, width, hanging="    ") + "\n")


def _said(row: ComparedSetting) -> str:
    written = "not written" if row.written is None else f"written {bare(row.written)}"
    if row.differs:
        result = "reported" if row.reported else "NOT REPORTED"
        return f"source {_shown(row.source)}, {written}, in effect {_shown(row.effective)}: {result}"
    if row.effective is None:
        return f"source {_shown(row.source)}, {written}"
    return bare(row.effective) if row.written == row.effective else f"{bare(row.effective)} ({written})"


def _shown(value: Any) -> str:
    return "-" if value is None else bare(value)


def _closing(found: Verification) -> Iterator[str]:
    source, effective = found.source, found.effective
    if source.missing or source.refused:
        yield f"source: {source.refused or source.missing}; compared with what unishard reads in it"
    if effective.missing:
        yield f"not verified: {effective.missing}"
    elif effective.refused:
        undecided = "; decide what needs input first" if found.needs_input else ""
        yield f"not verified: {effective.consumer} refuses it ({effective.refused}){undecided}"
    else:
        count, hidden = sum(row.differs for row in found.rows), len(found.unreported)
        yield (
            f"verified with {effective.consumer}: {len(found.rows)} settings, {count} differ, {hidden} of these "
            "unreported"
        )


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
    source: Annotated[Path, typer.Argument(metavar="IN", help="A config of any tool: YAML, JSON or TOML.")],
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

    Example: unishard translate ds_config.json --to unishard -o cfg.yaml

    Example: unishard translate sft.yaml --to unishard --with 'accelerate launch --config_file zero3.yaml train.py'
    """
    from unishard import formats

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
        _verify(outcome, request)
    if output is None:
        emit(outcome.text, end="")
    else:
        save(output, outcome.text)


def _verify(outcome: Outcome, request: TranslateRequest) -> None:
    """Say what the tool that reads the result makes of it, and exit with 2 if the report does not say a difference."""
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
