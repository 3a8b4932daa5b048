"""The fenced code blocks of the pages that people wrote."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {"schema.md"}
_GUIDE = sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name not in GENERATED)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *_GUIDE]

LOOPS = tuple(f"docs/from-{tool}.md" for tool in ("accelerate", "deepspeed", "trainer", "lightning"))
"""Pages with the same training in another tool's loop and in ours: test_loops_of_others.py."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """The blocks of these languages on all pages; all blocks when none is named."""
    return [block for block in _every() if not languages or block.language in languages]


@cache
def _every() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(str(page.relative_to(ROOT)), line, match[1], match[2]))
    return found
