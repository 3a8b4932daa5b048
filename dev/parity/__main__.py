"""Trains every cell on both engines and writes how far each is from plain torch: `make parity`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dev.parity.measuring import measured
from dev.parity.page import environment, page
from dev.parity.rows import FAILED, read, write


def main(arguments: Sequence[str]) -> int:
    """Write parity.csv and parity.md into a folder, also where cells fail; 1 in this case."""
    parser = argparse.ArgumentParser(prog="python -m dev.parity", description="Measure every cell on every engine.")
    parser.add_argument("folder", type=Path, help="where parity.csv and parity.md are written")
    parser.add_argument(
        "--only", metavar="FEATURE", nargs="+", default=[], help="measure these again, and keep the other rows"
    )
    asked = parser.parse_args(arguments)
    folder: Path = asked.folder
    rows = list(measured(read(folder / "parity.csv"), asked.only) if asked.only else measured())
    write(folder / "parity.csv", rows)
    (folder / "parity.md").write_text(page(rows, environment()), encoding="utf-8")
    broken = [row for row in rows if row.error.startswith(FAILED)]
    sys.stderr.writelines(f"{row.engine}, {row.cell}: {row.error}\n" for row in broken)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
