"""The command line. One small module for each command; each imports what it needs when it runs."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from unishard.cli import backends, checkpoint, convert, demo, diff, docs, doctor, explain, export, init, migrate, schema, set_, translate
from unishard.errors import UnishardError

__all__ = ["app", "main"]


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Why a write fails; such an error names no file."""


_TROUBLE = {"diff": 2, "checkpoint": 2}
"""Exit status when something is refused, of commands for which 1 means something else."""


class Commands(TyperGroup):
    """Says in one message what unishard, or the operating system, refuses. Anything else is a bug, and shows a traceback."""

    _command: str | None = None

    def invoke(self, ctx: Any) -> Any:
        """Run a command, and remember which one it was."""
        try:
            return super().invoke(ctx)
        finally:
            self._command = ctx.invoked_subcommand

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line; exit with 1 when something is refused, quietly when nobody reads the output any more."""
        try:
            try:
                return super().main(*args, **kwargs)
            finally:
                _flush()
        except (UnishardError, OSError) as error:
            message = _message(error)
            if message is None:
                raise
            with contextlib.suppress(OSError):  # standard error may be what cannot be written
                typer.echo(message, err=True, nl=bool(message))
            raise SystemExit(_TROUBLE.get(self._command or "", 1)) from None


def _message(error: UnishardError | OSError) -> str | None:
    """What to say about an error; None for a bug."""
    if isinstance(error, UnishardError):
        return str(error)
    if isinstance(error, BrokenPipeError):
        return ""
    if error.filename is not None:
        return f"{error.filename}: cannot be used ({error.strerror}); name another file or folder"
    if error.errno in _NO_ROOM:
        return f"the output cannot be written ({error.strerror}); make room, or write it somewhere else"
    return None


def _flush() -> None:
    """Write out what is buffered now, while an error can still be told."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            # The interpreter flushes once more at its end, and would complain in its own way.
            with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
            raise


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

_COMMANDS: dict[str, Callable[..., None]] = {
    "translate": translate.translate,
    "diff": diff.diff,
    "explain": explain.explain,
    "init": init.init,
    "set": set_.set_,
    "migrate": migrate.migrate,
    "schema": schema.schema,
    "docs": docs.docs,
    "backends": backends.backends,
    "doctor": doctor.doctor,
    "demo": demo.demo,
    "export": export.export,
}
for name, command in _COMMANDS.items():
    app.command(name)(command)
checkpoint.app.command("convert")(convert.convert)
app.add_typer(checkpoint.app, name="checkpoint")


def _version(wanted: bool) -> None:
    if wanted:
        from unishard.version import __version__

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
