"""`unishard migrate`: find a project's configs and check how each would translate."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unishard.cli.table import is_narrow, show, show_blocks
from unishard.errors import UnishardError
from unishard.mapping.rules import Fit

if TYPE_CHECKING:
    from unishard.formats.surveying import FoundConfig, UnreadableConfig

__all__ = ["migrate"]

_OUTCOMES = {0: "translates", 1: "refused", 2: "approximate"}


class MigrateForm(StrEnum):
    """Output format."""

    TEXT = "text"
    JSON = "json"


def migrate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Root directory of a project.", show_default=False)],
    to: Annotated[str, typer.Option(metavar="FORMAT", help="Target format.")] = "unishard",
    report: Annotated[MigrateForm, typer.Option(help="Output format.")] = MigrateForm.TEXT,
) -> None:
    """Find the configs of a project.

    Shows the format of each and how it would translate. Writes nothing. Skips virtual environments, node_modules, .git, and files above
    1 MiB.
    """
    from unishard.formats import catalog
    from unishard.formats.surveying import FoundConfig, UnreadableConfig, survey

    if not folder.is_dir():
        raise UnishardError(f"{folder}: is not a directory; name the directory of a project")
    catalog.get(to)
    seen = list(survey(folder, to))
    configs = [one for one in seen if isinstance(one, FoundConfig)]
    broken = [one for one in seen if isinstance(one, UnreadableConfig)]
    if report is MigrateForm.JSON:
        typer.echo(json.dumps({"to": to, "configs": list(map(_object, configs)), "unreadable": [_unread(one) for one in broken]}, indent=2))
        return
    _show(configs, broken, to)


def _show(configs: list[FoundConfig], broken: list[UnreadableConfig], to: str) -> None:
    columns = ("config", "format", "engine", "strategy", "precision", f"to {to}", "keys")
    if configs and is_narrow(len(columns), sys.stdout):
        show_blocks(((one.path, list(zip(columns[1:], _cells(one)[1:], strict=True))) for one in configs), sys.stdout)
    elif configs:
        show(columns, [_cells(one) for one in configs], sys.stdout)
    for one in broken:
        typer.echo(f"cannot be read: {one.path}: {one.why}")
    typer.echo(f"{len(configs)} configs, {sum(one.status == 0 for one in configs)} translate to {to}, {len(broken)} cannot be read")


def _cells(one: FoundConfig) -> tuple[str, ...]:
    counts = ", ".join(f"{count} {fit}" for fit, count in one.counts.items() if count)
    return (one.path, one.format, one.backend, one.strategy, one.precision, _OUTCOMES[one.status], counts)


def _object(one: FoundConfig) -> dict[str, object]:
    return {
        "path": one.path,
        "format": one.format,
        "backend": one.backend,
        "strategy": one.strategy,
        "precision": one.precision,
        "keys": {str(fit): one.counts[fit] for fit in Fit},
        "status": one.status,
    }


def _unread(one: UnreadableConfig) -> dict[str, str]:
    return {"path": one.path, "why": one.why}
