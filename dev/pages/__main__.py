"""Writes the generated pages: `make docs`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dev.pages.catalog import left_over, pages, sections


def main(arguments: Sequence[str]) -> int:
    """Write the pages that are out of date, or with `--check` only name them; 1 if there are any then."""
    parser = argparse.ArgumentParser(prog="python -m dev.pages", description="Write the generated pages.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    parser.add_argument("--root", type=Path, default=Path(), metavar="DIR", help="the root of the checkout")
    asked = parser.parse_args(arguments)
    try:
        stale = dict(_stale(asked.root))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    gone = left_over(asked.root)
    if asked.check:
        sys.stderr.writelines(f"{path}: is out of date; run `make docs` and commit it\n" for path in (*stale, *gone))
        return int(bool(stale or gone))
    for path, text in stale.items():
        (asked.root / path).parent.mkdir(parents=True, exist_ok=True)
        (asked.root / path).write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path}: written\n")
    for path in gone:
        (asked.root / path).unlink()
        sys.stdout.write(f"{path}: removed\n")
    return 0


def _stale(root: Path) -> Iterator[tuple[str, str]]:
    """Each page that differs from what it would be now, with its new text."""
    for name, text in (pages() | sections(root)).items():
        path = root / name
        if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != text:
            yield name, text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
