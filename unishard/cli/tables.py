"""Tables: drawn on a terminal, plain aligned columns elsewhere. No word is broken where a line ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from unishard.cli.wrapping import width_of, wrapped
from unishard.errors import printable

if TYPE_CHECKING:
    from rich.text import Text


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
_PLAIN = 120
"""Columns of what fits a file or a pipe."""
_WIDEST = 400
"""Longer cells do not make their column wider, so that one long name does not fill every row with spaces."""

Block = tuple[str, Sequence[tuple[str, str]]]
"""A heading and labeled lines below it."""


def is_narrow(columns: int, file: TextIO) -> bool:
    """Whether a stream is a terminal too narrow for a table with this many columns."""
    return file.isatty() and width_of(file) < _WIDEST_COLUMN * columns


def fitting(rows: Sequence[Sequence[str]], file: TextIO) -> list[int] | None:
    """The width of each column of a table, so that it fits a terminal and every word fits its column; None if none do,
    and in a file or a pipe.

    Args:
        rows: The cells, the heading included.
        file: The stream.
    """
    if not file.isatty():
        return None
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
    """Write blocks to a stream, wrapped between words."""
    from rich.console import Console
    from rich.text import Text

    width = width_of(file) if file.isatty() else _PLAIN
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
