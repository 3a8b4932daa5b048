"""Lines that fit a terminal, broken between words only. A command, an option with its value and a path stay whole."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from textwrap import TextWrapper
from typing import Any, TextIO

import typer

from unishard.errors import printable

_HYPHEN = "\ue000"
"""Stands for a hyphen while a help text is wrapped, because click breaks lines after hyphens."""
_SPACE = "\ue001"
"""Stands for a space at which no line breaks."""
_WHOLE = re.compile(r"`[^`\n]{1,60}`|--[a-z][\w-]* (?=[\w/.~$'\"-])")
"""What people paste: code in backticks, and an option with its value."""
_READABLE = 80
"""Columns of a report, on a wider terminal too."""


def width_of(file: TextIO) -> int:
    """Columns of a terminal, 80 if it does not know; COLUMNS comes first."""
    columns = shutil.get_terminal_size((0, 0)).columns
    with suppress(OSError, ValueError):
        columns = columns or os.get_terminal_size(file.fileno()).columns
    return columns or 80


def report_width(file: TextIO) -> int:
    """Columns of a report: those of a narrow terminal, else 80, as in a file or a pipe."""
    return min(_READABLE, width_of(file)) if file.isatty() else _READABLE


def shell_lines(words: Iterable[str], width: int = _READABLE, *, indent: str = "  ") -> str:
    """A command to paste, continued where the shell allows it: before an option, and at no other place.

    Args:
        words: Of the command, quoted.
        width: Of a line. A word that is longer stays whole.
        indent: Begins each line.
    """
    parts: list[str] = []
    for word in words:
        if parts and not word.startswith("-") and parts[-1].startswith("-") and " " not in parts[-1]:
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    lines = [indent + parts[0]]
    for part in parts[1:]:
        fits = len(lines[-1]) + len(part) + len("  \\") <= width
        lines[-1:] = [f"{lines[-1]} {part}"] if fits else [f"{lines[-1]} \\", f"{indent}  {part}"]
    return "\n".join(lines)


def wrapped(text: str, width: int, *, start: str = "", hanging: str | None = None) -> str:
    """Break lines that are too long between words.

    A word that is longer than a line stays whole, and so does what people paste.

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
    whole = _WHOLE.sub(lambda match: match[0].replace(" ", _SPACE), text)
    lines = (wrapper.fill(line) if len(start) + len(line) > width else start + line for line in whole.split("\n"))
    return "\n".join(lines).replace(_SPACE, " ")


def echo(text: object = "", *, err: bool = False, laid_out: bool = False) -> None:
    """Print lines with control characters escaped, wrapped on a terminal.

    Args:
        text: One or more lines.
        err: Whether to print to stderr.
        laid_out: Whether not to wrap.
    """
    file, shown = sys.stderr if err else sys.stdout, printable(str(text))
    typer.echo(wrapped(shown, width_of(file), hanging="    ") if file.isatty() and not laid_out else shown, err=err)


def emit(document: str, *, end: str = "\n") -> None:
    """Print what another program may read: as it is into a file or a pipe, with control characters escaped on a
    terminal.
    """
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
