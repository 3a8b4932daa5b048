"""Reads the tables of a page of docs/ that tests hold to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["DOCS", "rows"]

DOCS = Path(__file__).parents[2] / "docs"
_BREAK = re.compile(r" (?<!\\)\| ")


def rows(page: str) -> Iterator[tuple[str, list[str]]]:
    """The section and the cells of every row below the head of a table."""
    section, body = "", False
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:]
        if line.startswith("| ") and body:
            cells = _BREAK.split(f" {line} ")[1:-1]
            yield section, [cell.strip().replace("\\|", "|").replace("<br>", "\n") for cell in cells]
        body = line.startswith("|-") or (body and line.startswith("|"))
