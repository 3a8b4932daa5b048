"""`unishard diff`: compare the meaning of two configs of any tools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unishard.cli.completion import formats as formats_like
from unishard.cli.tables import is_narrow, show, show_blocks
from unishard.cli.text_report import key_value, value_of
from unishard.cli.wrapping import echo

if TYPE_CHECKING:
    from unishard.formats.report.comparing import Side

DIFFERENT = 1
"""Exit status when they differ, as in diff(1), where 2 means an error."""

Document = typer.Argument(help="A config of any tool.")


def diff(
    a: Annotated[Path, Document],
    b: Annotated[Path, Document],
    from_a: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Format of A. [default: detected]", autocompletion=formats_like)
    ] = None,
    from_b: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Format of B. [default: detected]", autocompletion=formats_like)
    ] = None,
) -> None:
    """Compare the meaning of two configs.

    They may be of different tools. Exits with 0 if they describe the same training, with 1 if they differ or something
    could not be compared, and with 2 if one cannot be read.

    Example: unishard diff accelerate.yaml cfg.yaml
    """
    from unishard import formats
    from unishard.formats.beside.engine_choice import needs_engine
    from unishard.formats.report.comparing import compare, uncompared

    readings = [formats.read(a, from_a), formats.read(b, from_b)]
    differences = compare(*readings)
    for reading in readings:
        if needs_engine(reading):
            note = "does not say its engine, which its launcher chooses; compared as no_shard"
            echo(f"{reading.source.name}: {note}", err=True)
    unknown = [f"{reading.source.name}: {warning}" for reading in readings for warning in reading.source.warnings]
    unknown += [
        f"{one.reading.source.name}: {key_value(one.entry)}: {one.entry.effect.note}" for one in uncompared(*readings)
    ]
    for what in unknown:
        echo(f"not compared: {what}", err=True)
    if not (differences or unknown):
        echo("same training")
        return
    if not differences:
        raise typer.Exit(DIFFERENT)
    names = [f"{side} ({reading.format})" for side, reading in zip("AB", readings, strict=True)]
    if is_narrow(3, sys.stdout):
        show_blocks(((at.field, [("A", _shown(at.before)), ("B", _shown(at.after))]) for at in differences), sys.stdout)
    else:
        show(("field", *names), [(at.field, _shown(at.before), _shown(at.after)) for at in differences], sys.stdout)
    raise typer.Exit(DIFFERENT)


def _shown(side: Side) -> str:
    if side.said or side.value is not None:
        return f"{value_of(side.value)}  ({side.origin})"
    return side.origin if side.silent else f"undecided: {side.origin}"
