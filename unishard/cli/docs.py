"""`unishard docs`: write the pages generated from the schema and the rules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unishard.cli.wrapping import echo
from unishard.errors import UnishardError


def docs(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if a page is out of date.")
    ] = False,
    root: Annotated[Path, typer.Option(metavar="DIR", help="Root of the checkout.")] = Path(),
) -> None:
    """Write the generated pages.

    MAPPING.md from the backends' rules, docs/formats.md from the formats' tables, docs/schema.md from the config
    schema, docs/manifest.md from the manifest schema, and in docs/engines.md the table of private names.

    Example: unishard docs --check
    """
    from unishard.tools.reference.pages import pages, sections

    stale = []
    for name, text in (pages() | sections(root)).items():
        path = root / name
        if path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if check and stale:
        raise UnishardError("\n".join(f"{name}: is out of date; run `unishard docs` and commit it" for name in stale))
    echo("\n".join(f"{name}: written" for name in stale) or "up to date")
