"""Lines for a terminal, broken between words only; elsewhere a line stays one line."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from textwrap import TextWrapper
from typing import Any, TextIO

import typer

from unishard.printable import printable

__all__ = ["Prose", "echo", "emit", "keep_words_whole", "width_of", "wrapped"]

_HYPHEN = "\ue000"
"""Stands for a hyphen while a help text is wrapped, because click breaks lines after hyphens."""


def width_of(file: TextIO) -> int:
    """Columns of a terminal, 80 if it does not know; COLUMNS comes first."""
    columns = shutil.get_terminal_size((0, 0)).columns
    with suppress(OSError, ValueError):
        columns = columns or os.get_terminal_size(file.fileno()).columns
    return columns or 80


def wrapped(text: str, width: int, *, start: str = "", hanging: str | None = None) -> str:
    """Break lines that are too long between words. A word that is longer than a line stays whole.

    Args:
        text: One or more lines.
        width: Of the terminal.
        start: Begins each line.
        hanging: Begins the continuations of a line instead of `start`.
    """
    wrapper = TextWrapper(
        width,
        initial_indent=start,
        subsequent_indent=start if hanging is None else hanging,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        drop_whitespace=True,
    )
    return "\n".join(wrapper.fill(line) if len(start) + len(line) > width else start + line for line in text.split("\n"))


class Prose:
    """A stream that wraps lines that are too long for its terminal. What rich has laid out passes as it is."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write text, wrapped on a terminal."""
        laid_out = "\x1b" in text or not self._file.isatty()
        return self._file.write(text if laid_out else wrapped(text, width_of(self._file), hanging="    "))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def echo(text: object = "", *, err: bool = False, laid_out: bool = False) -> None:
    """Print lines with control characters escaped, wrapped on a terminal.

    Args:
        text: One or more lines.
        err: Whether to print to stderr.
        laid_out: Whether not to wrap.
    """
    file, said = sys.stderr if err else sys.stdout, printable(str(text))
    typer.echo(wrapped(said, width_of(file), hanging="    ") if file.isatty() and not laid_out else said, err=err)


def emit(document: str, *, end: str = "\n") -> None:
    """Print what another program may read: as it is into a file or a pipe, with control characters escaped on a terminal."""
    typer.echo((printable(document) if sys.stdout.isatty() else document) + end, nl=False)


def keep_words_whole(command: Any) -> Any:
    """Let the help of a command, and of those in it, break lines only at spaces."""
    context = command.context_class
    formatter = _formatter(context.formatter_class)
    command.context_class = type(context.__name__, (context,), {"formatter_class": formatter})
    for inner in getattr(command, "commands", {}).values():
        if inner is not None:
            keep_words_whole(inner)
    return command


def _formatter(base: Any) -> type[Any]:
    class Formatter(base):  # type: ignore[misc]  # click's, or the copy in typer
        """Hides the hyphens of words from the wrapping."""

        def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
            super().write_usage(prog, _hidden(args), prefix)

        def write_text(self, text: str) -> None:
            super().write_text(_hidden(text))

        def write_dl(self, rows: Any, *args: Any, **kwargs: Any) -> None:
            super().write_dl([(first, _hidden(second)) for first, second in rows], *args, **kwargs)

        def getvalue(self) -> str:
            return str(super().getvalue()).replace(_HYPHEN, "-")

    return Formatter


def _hidden(text: str) -> str:
    return text.replace("-", _HYPHEN)
