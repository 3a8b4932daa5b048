"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["ConfigFile", "Overrides", "WorldSize"]

ConfigFile = Annotated[Path, typer.Argument(metavar="CFG", help="A YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change a field, such as training.seed=1. May be repeated.", show_default=False),
]
WorldSize = Annotated[int, typer.Option(min=1, metavar="N", help="Number of ranks.")]
