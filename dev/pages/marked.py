"""The part of a page that a program writes: between a line `<!-- NAME: ... -->` and a line `<!-- end of NAME -->`."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["SIMULATED", "part", "replaced", "write"]

SIMULATED = "(simulated)"
"""In the name of a device that is none: that of `make device-sim`."""


def part(page: Path, name: str) -> str:
    """What a page says there.

    Raises:
        ValueError: The page has no part of this name.
    """
    _, found, _ = _divided(page, name)
    return found.removesuffix("\n")


def replaced(page: Path, name: str, text: str) -> str:
    """The page with another text there.

    Raises:
        ValueError: The page has no part of this name, or the text has figures of a simulated device.
    """
    if SIMULATED in text:
        raise ValueError(f"{page} takes no figure of a simulated device, and these name one: {text.splitlines()[0]}")
    before, _, after = _divided(page, name)
    return f"{before}{text}\n{after}"


def write(page: Path, name: str, text: str) -> None:
    """Write another text there."""
    page.write_text(replaced(page, name, text), encoding="utf-8")


def _divided(page: Path, name: str) -> tuple[str, str, str]:
    """The page with its first mark, its part, and the rest from the last mark on."""
    begin, end = rf"<!-- {name}: [^\n]* -->\n", rf"<!-- end of {name} -->\n"
    found = re.fullmatch(rf"(.*^{begin})(.*?)(^{end}.*)", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{page}: no generated part; add the lines <!-- {name}: ... --> and <!-- end of {name} -->")
    return found[1], found[2], found[3]
