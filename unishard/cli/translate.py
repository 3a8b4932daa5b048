"""`unishard translate`: the native config of one backend on stdout, and the report on stderr."""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from unishard.cli.arguments import ConfigFile, Overrides, WorldSize
from unishard.cli.table import is_narrow, show, show_blocks
from unishard.errors import ConfigError, UnishardError
from unishard.rules import Fit, Report
from unishard.topology import Topology

__all__ = ["translate"]

APPROXIMATE = 2
"""Exit status under `--strict` when the backend can only approximate what the config asks."""


class ReportForm(StrEnum):
    """How the report is written."""

    TEXT = "text"
    """What is not exact, as a table, and how many fields there are of each fit."""
    FULL = "full"
    """Every field, as a table."""
    JSON = "json"
    """Every field, as a list of objects."""
    NONE = "none"


def translate(
    config: ConfigFile,
    to: Annotated[str | None, typer.Option(metavar="BACKEND", help="A backend (see `unishard backends`). [default: the config's]")] = None,
    world_size: WorldSize = 1,
    set_: Overrides = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the native config here.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 2 and write nothing when something is only approximate.")] = False,
    report: Annotated[ReportForm, typer.Option(help="Form of the report on stderr.")] = ReportForm.TEXT,
) -> None:
    """Print the native config of a backend.

    JSON on stdout, in the engine's own words; on stderr, how well it fits.
    """
    from unishard.loading import read
    from unishard.translation import translate as to_native

    cfg, origins = read(config, set_ or ())
    try:
        translation = to_native(cfg, backend=to, topology=Topology(world_size, world_size))
        _write_report(translation.report, report, translation.backend)
        translation.check(strict=False)
    except ConfigError as error:
        raise origins.locate(error) from None
    if (strict or cfg.strict) and translation.report.of(Fit.APPROXIMATE):
        try:
            translation.check(strict=True)
        except ConfigError as error:
            typer.echo(origins.locate(error), err=True)
            raise typer.Exit(APPROXIMATE) from None
    text = json.dumps(translation.native, indent=2, allow_nan=False) + "\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        _save(output, text)


def _write_report(report: Report, form: ReportForm, backend: str) -> None:
    if form is ReportForm.JSON:
        fields = ("path", "value", "fit", "native", "note")
        typer.echo(json.dumps([{name: getattr(line, name) for name in fields} for line in report], indent=2), err=True)
    elif form is not ReportForm.NONE:
        from unishard.wording import bare

        lines = [line for line in report if form is ReportForm.FULL or line.fit is not Fit.EXACT]
        columns = ("field", "value", "fit", backend, "note")
        if is_narrow(len(columns), sys.stderr):
            show_blocks(
                ((f"{at.path} = {bare(at.value)}", [(backend, f"{at.fit}: {at.native}"), *_noted(at.note)]) for at in lines), sys.stderr
            )
        elif lines:
            show(columns, [(line.path, bare(line.value), str(line.fit), line.native, line.note) for line in lines], sys.stderr)
        counts = ", ".join(f"{len(of)} {fit}" for fit in Fit if (of := report.of(fit)))
        typer.echo(f"{backend}: {counts}" + (" (--report full shows every field)" if form is ReportForm.TEXT else ""), err=True)


def _noted(note: str) -> list[tuple[str, str]]:
    return [("", note)] if note else []


def _save(path: Path, text: str) -> None:
    """Write a file whole or not at all; a pipe or a device cannot be exchanged and is written to as it is."""
    try:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            mode = stat.S_IFREG | 0o666 & ~_umask()
        if stat.S_ISREG(mode):
            _replace(Path(os.path.realpath(path)), text, stat.S_IMODE(mode))
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnishardError(f"{path}: cannot be written ({error.strerror}); name a file in a folder that exists and is writable") from None


def _replace(path: Path, text: str, mode: int) -> None:
    """Put a file in the place of another, or of none, in one step."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(draft).chmod(mode)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
