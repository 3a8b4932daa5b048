"""`unishard set`: edit fields of a unishard file in place."""

from __future__ import annotations

from typing import Annotated

import typer

from unishard.cli import arguments
from unishard.cli.arguments import ConfigFile, own_file, save
from unishard.errors import ConfigError


def set_(
    config: ConfigFile,
    changes: Annotated[
        list[str],
        typer.Argument(metavar="FIELD=VALUE...", help="For example training.seed=1.", autocompletion=arguments.changes),
    ],
) -> None:
    """Edit fields of a unishard file in place.

    Keeps comments, order and quotes. Does not change the file if the result would be invalid.

    Example: unishard set cfg.yaml training.seed=1 optimizer.lr=1e-4
    """
    from unishard.config.loading.document import from_text
    from unishard.config.loading.editing import check_text, edit
    from unishard.contract.report import require_installed

    with own_file(config):
        text = edit(config, changes)
        origins = from_text(text, str(config)).origins
        try:
            require_installed(check_text(text, str(config)))
        except ConfigError as error:
            raise origins.locate(error) from None
    save(config, text)
