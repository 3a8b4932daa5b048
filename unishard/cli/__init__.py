"""The command line. One small module for each command; each imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from unishard.cli import backends, demo, docs, explain, schema, translate
from unishard.errors import UnishardError

__all__ = ["app", "main"]


class Commands(TyperGroup):
    """Prints what unishard refuses on purpose without a traceback. Anything else is a bug, and shows one."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; exit with 1 when it refuses."""
        try:
            return super().invoke(ctx)
        except UnishardError as error:
            typer.echo(error, err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    name="unishard",
    cls=Commands,
    help="One config, two real sharding engines, one training loop.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

for command in (translate.translate, explain.explain, schema.schema, docs.docs, backends.backends, demo.demo):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        from unishard import __version__

        typer.echo(f"unishard {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """One config, two real sharding engines, one training loop."""


def main() -> None:
    """What the script `unishard` and `python -m unishard` run."""
    app(prog_name="unishard")
