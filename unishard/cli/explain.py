"""`unishard explain`: every effective value, where it came from, and what it becomes on every installed backend."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from unishard.cli.arguments import ConfigFile, Overrides, WorldSize
from unishard.cli.table import is_narrow, show, show_blocks
from unishard.errors import ConfigError
from unishard.rules import Fit
from unishard.topology import Topology
from unishard.wording import bare

if TYPE_CHECKING:
    from unishard.explanation import Image, Row

__all__ = ["explain"]

_COLUMNS = ("field", "value", "from")


def explain(config: ConfigFile, set_: Overrides = None, world_size: WorldSize = 1) -> None:
    """Show every value and what it becomes.

    Each field of the config: its value, where it came from, and what it becomes on each installed backend.
    """
    from unishard.explanation import explain as rows_of
    from unishard.loading import read

    cfg, origins = read(config, set_ or ())
    try:
        rows = rows_of(cfg, origins, Topology(world_size, world_size))
    except ConfigError as error:
        raise origins.locate(error) from None
    names = sorted({name for row in rows for name in row.images})
    if is_narrow(len(_COLUMNS) + len(names), sys.stdout):
        show_blocks(((f"{row.path} = {bare(row.value)}  ({row.origin})", list(_lines(row, names))) for row in rows), sys.stdout)
    else:
        _show_tables(rows, names)


def _show_tables(rows: Sequence[Row], names: Sequence[str]) -> None:
    cells = [(row.path, bare(row.value), row.origin, *(_becomes(row.images.get(name)) for name in names)) for row in rows]
    show((*_COLUMNS, *names), cells, sys.stdout)
    notes = [
        (name, row.path, image.fit, image.note)
        for name in names
        for row in rows
        if (image := row.images.get(name)) and image.fit is not Fit.EXACT
    ]
    if notes:
        sys.stdout.write("\n")
        show(("backend", "field", "fit", "note"), notes, sys.stdout)


def _lines(row: Row, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A field on each backend: what it becomes, and below it how that differs."""
    for name in names:
        if image := row.images.get(name):
            yield name, _becomes(image)
            if image.fit is not Fit.EXACT:
                yield "", image.note


def _becomes(image: Image | None) -> str:
    return f"{image.fit}: {image.native}" if image else ""
