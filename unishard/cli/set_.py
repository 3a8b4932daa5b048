"""`unishard set`: changes fields in a unishard file, and nothing else in it."""

from __future__ import annotations

from typing import Annotated

import typer

from unishard.cli.arguments import ConfigFile
from unishard.cli.checkpoint_formats import own_file
from unishard.cli.saving import save

__all__ = ["set_"]


def set_(
    config: ConfigFile,
    changes: Annotated[list[str], typer.Argument(metavar="FIELD=VALUE...", help="Such as training.seed=1.", show_default=False)],
) -> None:
    """Change fields in a unishard file.

    Comments, order and quotes stay as they are. The file is left alone if what would come out has a mistake.
    """
    from unishard.loading.editing import edit

    with own_file(config):
        text = edit(config, changes)
    save(config, text)
