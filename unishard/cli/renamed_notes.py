"""Warnings about fields that are renamed or left out, as one plain line each instead of two with a source path."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from unishard.cli.wrapping import echo
from unishard.errors import RenamedFieldWarning, UnusedFieldWarning

_NOTES = (RenamedFieldWarning, UnusedFieldWarning)


@contextmanager
def collected() -> Iterator[list[str]]:
    """Collect the notes about fields while something runs, each once; other warnings are shown as always."""
    notes: list[str] = []
    with warnings.catch_warnings():
        for kind in _NOTES:
            warnings.simplefilter("always", kind)
        show = warnings.showwarning

        def keep(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if not issubclass(category, _NOTES):
                show(message, category, filename, lineno, file, line)
            elif str(message) not in notes:
                notes.append(str(message))

        warnings.showwarning = keep
        yield notes


@contextmanager
def plain_notes() -> Iterator[None]:
    """Write the notes about fields to stderr, one line each."""
    with collected() as notes:
        try:
            yield
        finally:
            for note in notes:
                echo(f"warning: {note}", err=True)
