"""`unishard explain`: every effective value, where it came from, and what it becomes on every installed backend."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from unishard.cli.arguments import ConfigFile, GpusPerNode, Overrides, WorldSize, topology_of
from unishard.cli.table import show
from unishard.errors import ConfigError
from unishard.rules import Fit

if TYPE_CHECKING:
    from unishard.explanation import Image

__all__ = ["explain"]


def explain(config: ConfigFile, set_: Overrides = None, world_size: WorldSize = 1, gpus_per_node: GpusPerNode = None) -> None:
    """Show every value and what it becomes.

    Each field of the config: its value, where it came from, and what it becomes on each installed backend.
    """
    from unishard.explanation import explain as rows_of
    from unishard.loading import read
    from unishard.wording import bare

    topology = topology_of(world_size, gpus_per_node)
    cfg, origins = read(config, set_ or ())
    try:
        rows = rows_of(cfg, origins, topology)
    except ConfigError as error:
        raise origins.locate(error) from None
    names = sorted({name for row in rows for name in row.images})
    table = [(row.path, bare(row.value), row.origin, *(_becomes(row.images.get(name)) for name in names)) for row in rows]
    show(("field", "value", "from", *names), table, sys.stdout)
    notes = [
        (name, row.path, image.fit, image.note)
        for name in names
        for row in rows
        if (image := row.images.get(name)) and image.fit is not Fit.EXACT
    ]
    if notes:
        sys.stdout.write("\n")
        show(("backend", "field", "fit", "note"), notes, sys.stdout)


def _becomes(image: Image | None) -> str:
    return f"{image.fit}: {image.native}" if image else ""
