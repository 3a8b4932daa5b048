"""Warnings about renamed fields, as one plain line each instead of Python's two with a source path."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from unishard.cli.wrapping import echo
from unishard.errors import RenamedFieldWarning


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
