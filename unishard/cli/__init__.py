"""The command line. One small module for each command; each imports what it needs when it runs."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from unishard.cli.renamed_notes import plain_notes
from unishard.cli.wrapping import echo, keep_words_whole
from unishard.errors import UnishardError

__all__ = ["app", "main"]


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a failed write that name no file."""


_COMMANDS = (
    "init",
    "translate",
    "diff",
    "schema",
    "explain",
    "check",
    "plan",
    "doctor",
    "launch",
    "compare",
    "checkpoint",
)
"""In the order in which they are needed: a config, what it says, what it needs, a run, what is left of it. Each is a
module here that holds a function of the same name, or a group called `app`."""

_REPLACED = {
    "parity": "compare --golden",
    "export": "checkpoint export",
    "migrate": "translate DIR",
    "backends": "doctor",
    "demo": "make demo in a checkout",
}
"""Commands of earlier versions, and what replaces each."""

_OPTIONAL = ("torch", "numpy", "safetensors", "transformers")
"""Packages that a command may need, and that neither a wheel nor a checkout of unishard brings by itself."""

_TROUBLE = {"diff": 2, "compare": 2, "checkpoint": 2}
"""Exit status on an error, for commands where 1 has another meaning."""


class Commands(TyperGroup):
    """The command group.

    Errors of unishard and the operating system print one message; any other is a bug and prints a traceback.
    """

    _command: str | None = None

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(_COMMANDS)  # type: ignore[assignment]  # built by `get_command`
        keep_words_whole(self)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and build one command; building all of them takes longer than a translation."""
        return _built(cmd_name) if cmd_name in _COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command; one of an earlier version is named with what replaces it."""
        if args[0] in _REPLACED:
            ctx.fail(f"No such command {args[0]!r}. Use {_REPLACED[args[0]]}.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command and record its name."""
        try:
            return super().invoke(ctx)
        finally:
            self._command = ctx.invoked_subcommand

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line; exit with 1 on an error, silently when the output pipe is closed."""
        try:
            try:
                with plain_notes():
                    return super().main(*args, **kwargs)
            finally:
                _flush()
        except (UnishardError, OSError, ModuleNotFoundError) as error:
            message = _message(error, self._command or "")
            if message is None:
                raise
            with contextlib.suppress(OSError):  # stderr may be the stream that failed
                if message:
                    echo(message, err=True)
            raise SystemExit(_TROUBLE.get(self._command or "", 1)) from None


def _built(name: str) -> Any:
    """The command of a name."""
    module = import_module(f"unishard.cli.{name}")
    group = getattr(module, "app", None)
    if group is None:
        group = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        group.command(name, cls=getattr(module, "Command", None))(getattr(module, name))
    return keep_words_whole(typer.main.get_command(group))


def _message(error: UnishardError | OSError | ModuleNotFoundError, command: str) -> str | None:
    """The message for an error; None for a bug."""
    if isinstance(error, UnishardError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        known = error.name in _OPTIONAL
        problem = f"unishard {command} needs {error.name}, which is not installed; pip install {error.name}"
        return problem if known else None
    if isinstance(error, BrokenPipeError):
        return ""
    if error.filename is not None:
        return f"{error.filename}: cannot be opened ({error.strerror}); name another file or directory"
    if error.errno in _NO_ROOM:
        return f"cannot write the output ({error.strerror}); free some space, or write it to another disk"
    return None


def _flush() -> None:
    """Flush now, while an error can still be reported."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            # The interpreter flushes again at exit and would print its own error.
            with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
            raise


app = typer.Typer(
    name="unishard",
    cls=Commands,
    help="One config and one training loop for PyTorch FSDP2 and DeepSpeed ZeRO.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(wanted: bool) -> None:
    if wanted:
        from unishard.version import __version__

        echo(f"unishard {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """One config and one training loop for PyTorch FSDP2 and DeepSpeed ZeRO."""


def main() -> None:
    """Entry point of `unishard` and `python -m unishard`."""
    try:
        app(prog_name="unishard")
    finally:
        gc.freeze()  # the process ends here: to search all modules for garbage takes a fifth of a translation
