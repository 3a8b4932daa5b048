"""Markdown tables and values of the generated pages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any


def code(value: Any) -> str:
    """Format a value as inline code."""
    return f"`{json.dumps(value)}`" if not isinstance(value, str) else f"`{value}`"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_escaped(cell) for cell in line)} |" for line in lines)


def _escaped(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")
