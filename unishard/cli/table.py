"""Tables: drawn on a terminal, plain aligned columns elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["FIT_STYLES", "is_narrow", "show", "show_blocks"]

FIT_STYLES = {
    "exact": "green",
    "equivalent": "cyan",
    "ignored": "dim",
    "approximate": "yellow",
    "needs input": "bold magenta",
    "unsupported": "bold red",
    "ok": "green",
    "warn": "yellow",
    "fail": "bold red",
}
"""Style of a cell or line, by its first word up to a colon."""
_READABLE = 25
"""Average width of a readable table column, in characters."""

Block = tuple[str, Sequence[tuple[str, str]]]
"""A heading and labeled lines below it."""


def is_narrow(columns: int, file: TextIO) -> bool:
    """Whether a stream is a terminal too narrow for a table with this many columns."""
    if not file.isatty():
        return False
    from rich.console import Console

    return Console(file=file).width < _READABLE * columns


def show(columns: Sequence[str], rows: Sequence[Sequence[str]], file: TextIO) -> None:
    """Write a table to a stream."""
    if file.isatty():
        _draw(columns, rows, file)
        return
    widths = [max(len(row[at]) for row in (columns, *rows)) for at in range(len(columns))]
    for row in (columns, *rows):
        file.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")


def show_blocks(blocks: Iterable[Block], file: TextIO) -> None:
    """Write blocks to a terminal, wrapped at its width."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(file=file)
    for heading, lines in blocks:
        console.print(Text(heading, style="bold", overflow="fold"))
        grid = Table.grid("label", "text", padding=(0, 2, 0, 0))
        for label, text in lines:
            grid.add_row(Text(label), _colored(text))
        if lines:
            console.print(Padding(grid, (0, 0, 0, 2), expand=False))


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]], file: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=file)
    whole = max(len(row[0]) for row in rows) <= console.width // len(columns)
    table = Table(header_style="bold", show_lines=False)
    for at, name in enumerate(columns):
        table.add_column(name, overflow="fold", no_wrap=at == 0 and whole)
    for row in rows:
        table.add_row(*map(_colored, row))
    console.print(table)


def _colored(cell: str) -> Text:
    from rich.text import Text

    return Text(cell, style=FIT_STYLES.get(cell.partition(":")[0], ""), overflow="fold")
