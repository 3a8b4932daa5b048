"""Lines that fit a terminal, broken between words only. A command, an option with its value and a path stay whole."""

from __future__ import annotations

import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Any, TextIO

import typer

from unishard.errors import RenamedFieldWarning, printable

if TYPE_CHECKING:
    from rich.text import Text


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
    whole = _WHOLE.sub(lambda found: found[0].replace(" ", _SPACE), text)
    lines = (wrapper.fill(line) if len(start) + len(line) > width else start + line for line in whole.split("\n"))
    return "\n".join(lines).replace(_SPACE, " ")


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


# -- Tables: drawn on a terminal, plain aligned columns elsewhere. No word is broken where a line ends --

FIT_STYLES = {
    "exact": "green",
    "equivalent": "cyan",
    "ignored": "dim",
    "off": "dim",
    "unused": "dim",
    "approximate": "yellow",
    "needs input": "bold magenta",
    "unsupported": "bold red",
    "ok": "green",
    "warn": "yellow",
    "fail": "bold red",
}
"""Style of a cell or line, by its first word up to a colon."""
_WIDEST_COLUMN = 25
"""Average width of a readable table column, in characters."""
_WIDEST = 400
"""Longer cells do not make their column wider, so that one long name does not fill every row with spaces."""

Block = tuple[str, Sequence[tuple[str, str]]]
"""A heading and labeled lines below it."""


def is_narrow(columns: int, file: TextIO) -> bool:
    """Whether a stream is a terminal too narrow for a table with this many columns."""
    return file.isatty() and width_of(file) < _WIDEST_COLUMN * columns


def fitting(rows: Sequence[Sequence[str]], file: TextIO) -> list[int] | None:
    """The width of each column of a table, so that it fits a terminal and every word fits its column; None if none do.

    Args:
        rows: The cells, the heading included.
        file: The terminal.
    """
    from rich.cells import cell_len

    columns = list(zip(*rows, strict=True))
    longest = [max((cell_len(word) for cell in column for word in cell.split()), default=1) for column in columns]
    whole = [max((cell_len(line) for cell in column for line in cell.splitlines()), default=1) for column in columns]
    room = width_of(file) - 3 * len(columns) - 1  # each column has a border and two spaces
    if sum(whole) <= room:
        return whole
    spare = room - sum(longest)
    if spare < 0:
        return None
    widths, left = list(longest), len(columns)
    for at in sorted(range(left), key=lambda at: whole[at] - longest[at]):  # what is nearly whole comes first
        more = min(whole[at] - longest[at], spare // left)
        widths[at], spare, left = longest[at] + more, spare - more, left - 1
    return widths


def show(columns: Sequence[str], rows: Sequence[Sequence[str]], file: TextIO) -> None:
    """Write a table to a stream; to a terminal on which a word would not fit its column, a block for each row."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if file.isatty():
        widths = fitting([columns, *rows], file)
        if widths is None:
            show_blocks(
                ((row[0], [pair for pair in zip(columns[1:], row[1:], strict=True) if pair[1]]) for row in rows), file
            )
        else:
            _draw(columns, rows, widths, file)
        return
    whole = [min(_WIDEST, max(len(row[at]) for row in (columns, *rows))) for at in range(len(columns))]
    for row in (columns, *rows):
        file.write("  ".join(cell.ljust(width) for cell, width in zip(row, whole, strict=True)).rstrip() + "\n")


def show_blocks(blocks: Iterable[Block], file: TextIO) -> None:
    """Write blocks to a terminal, wrapped between words."""
    from rich.console import Console
    from rich.text import Text

    width = width_of(file)
    console = Console(file=file, width=width)
    for heading, lines in blocks:
        console.print(Text(wrapped(printable(heading), width, hanging="  "), style="bold"), soft_wrap=True)
        lines = [(printable(label), printable(text)) for label, text in lines]
        indent = 4 + max((len(label) for label, _ in lines), default=0)
        for label, text in lines:
            style = FIT_STYLES.get(text.partition(":")[0], "")
            room = width - indent
            beside = all(len(word) <= room for word in text.split())
            start = f"  {label}".ljust(indent) if beside else f"  {label}\n    " if label else "    "
            body = wrapped(text, width, start=" " * (indent if beside else 4))
            console.print(Text.assemble(start, (body.lstrip(" "), style)), soft_wrap=True)


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int], file: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(header_style="bold", show_lines=False)
    for name, width in zip(columns, widths, strict=True):
        table.add_column(name, overflow="fold", width=width)
    for row in rows:
        table.add_row(*map(_colored, row))
    Console(file=file, width=width_of(file)).print(table)


def _colored(cell: str) -> Text:
    from rich.text import Text

    return Text(cell, style=FIT_STYLES.get(cell.partition(":")[0], ""), overflow="fold")


# -- Warnings about renamed fields, as one plain line each instead of Python's two with a source path --


@contextmanager
def collected() -> Iterator[list[str]]:
    """Collect the notes about renamed fields while something runs, each once; other warnings are shown as always."""
    notes: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", RenamedFieldWarning)
        show = warnings.showwarning

        def keep(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if not issubclass(category, RenamedFieldWarning):
                show(message, category, filename, lineno, file, line)
            elif str(message) not in notes:
                notes.append(str(message))

        warnings.showwarning = keep
        yield notes


@contextmanager
def plain_notes() -> Iterator[None]:
    """Write the notes about renamed fields to stderr, one line each."""
    with collected() as notes:
        try:
            yield
        finally:
            for note in notes:
                echo(f"warning: {note}", err=True)
