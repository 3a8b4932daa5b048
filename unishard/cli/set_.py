"""`unishard set`: edit fields of a unishard file in place."""

from __future__ import annotations

from typing import Annotated

import typer

from unishard.cli.arguments import ConfigFile
from unishard.cli.checkpoint_formats import own_file
from unishard.cli.saving import save

__all__ = ["set_"]


def set_(
    config: ConfigFile,
    changes: Annotated[list[str], typer.Argument(metavar="FIELD=VALUE...", help="For example training.seed=1.", show_default=False)],
) -> None:
    """Edit fields of a unishard file in place.

    Keeps comments, order and quotes. Does not change the file if the result would be invalid.
    """
    from unishard.loading.editing import edit

    with own_file(config):
        text = edit(config, changes)
    save(config, text)
