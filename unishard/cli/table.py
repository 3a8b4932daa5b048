"""Tables for people: drawn on a terminal, plain aligned columns everywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

__all__ = ["FIT_STYLES", "show"]

FIT_STYLES = {"exact": "green", "equivalent": "cyan", "approximate": "yellow", "unsupported": "red"}


def show(columns: Sequence[str], rows: Sequence[Sequence[str]], file: TextIO, *, title: str = "") -> None:
    """Write a table to a stream."""
    if file.isatty():
        _draw(columns, rows, file, title)
        return
    widths = [max(len(row[at]) for row in (columns, *rows)) for at in range(len(columns))]
    if title:
        file.write(f"{title}\n")
    for row in (columns, *rows):
        file.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]], file: TextIO, title: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", title_style="bold", header_style="bold", show_lines=False)
    for at, name in enumerate(columns):
        table.add_column(name, overflow="fold", no_wrap=at == 0)
    for row in rows:
        table.add_row(*(Text(cell, style=FIT_STYLES.get(cell.partition(":")[0], "")) for cell in row))
    Console(file=file).print(table)
