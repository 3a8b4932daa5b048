"""The part of a page that a benchmark writes, between two marks."""

from __future__ import annotations

from pathlib import Path

SIMULATED = "(simulated)"
"""In the name of a device that is none: that of `make device-sim`."""


def replace(page: Path, begin: str, end: str, text: str) -> str:
    """Replace what stands between the marks of a page, and return the page.

    Raises:
        ValueError: The page has no marks, or the text has figures of a simulated device.
    """
    if SIMULATED in text:
        raise ValueError(
            f"{page} takes no figure of a simulated device, and these name one: {text.partition(chr(10))[0]}"
        )
    before, first, rest = page.read_text(encoding="utf-8").partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise ValueError(f"{page} has no lines {begin} and {end}")
    written = f"{before}{begin}\n{text}\n{end}{after}"
    page.write_text(written, encoding="utf-8")
    return written
