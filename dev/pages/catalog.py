"""The generated pages by their paths in the checkout."""

from __future__ import annotations

from pathlib import Path

from dev.pages.formats import FOLDER, format_pages
from dev.pages.manifest import manifest
from dev.pages.mapping import mapping
from dev.pages.marked import replaced
from dev.pages.private_names import private_names
from dev.pages.schema import schema
from unishard.contract import registry
from unishard.contract.backend import Backend


def pages() -> dict[str, str]:
    """The text of each page that is generated as a whole, for the backends that ship with unishard."""
    return {
        "MAPPING.md": mapping(_own()),
        "docs/manifest.md": manifest(),
        **format_pages(),
        "docs/schema.md": schema(),
    }


def sections(root: Path) -> dict[str, str]:
    """The text of each page of which a part is generated; missing pages are skipped.

    Raises:
        ValueError: A page lacks the markers of the generated part.
    """
    name = "docs/engines.md"
    path = root / name
    return {name: replaced(path, "private names", f"\n{private_names(_own())}\n")} if path.is_file() else {}


def left_over(root: Path) -> list[str]:
    """The pages of tools that are gone, by their paths in the checkout."""
    there = {str(path.relative_to(root)) for path in (root / FOLDER).glob("*.md")}
    return sorted(there - format_pages().keys())


def _own() -> list[Backend]:
    """The backends that ship with unishard."""
    shipped = [
        name for name, point in registry.available().items() if point.dist is None or point.dist.name == "unishard"
    ]
    return [registry.get(name) for name in sorted(shipped, reverse=True)]
