"""Plays every fault on both engines and writes into docs/reliability.md how long each took: `make faults`."""

from __future__ import annotations

import argparse
import sys
import time

from dev.faults.fault import Fault
from dev.faults.played import PLAYED
from dev.integrity import page as integrity
from dev.pages.rows import DOCS
from dev.ranks.scripts import endings
from unishard.testing.cells import BACKENDS


def timed(page: str, seconds: dict[tuple[Fault, str], float]) -> str:
    """The page with the seconds of each fault, on one engine and the other, in the last column."""
    for fault in PLAYED:
        begin = page.index(f"| {fault.what} | {fault.where} | ")
        end = page.index("\n", begin)
        row = page[begin:end].rpartition(" | ")[0]
        took = " / ".join(f"{seconds[fault, backend]:.1f}" for backend in BACKENDS)
        page = f"{page[:begin]}{row} | {took} |{page[end:]}"
    return page


def main() -> int:
    """Play every fault and note how long it took, unless one ended otherwise than listed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="play what contains this, such as 'kill -9' or SIGTERM; writes no page",
    )
    only, begin, wrong = parser.parse_args().only, time.monotonic(), 0
    asked = [(fault, backend) for fault in PLAYED for backend in BACKENDS]
    asked = [(fault, backend) for fault, backend in asked if only in f"{fault.what}, {fault.where}, {backend}"]
    runs = tuple(fault.run(backend) for fault, backend in asked)
    found = dict(zip(asked, endings(runs).values(), strict=True))
    for (fault, backend), ending in found.items():
        problem = fault.wrong(ending)
        wrong += bool(problem)
        sys.stderr.write(f"{fault.what}, {fault.where}, {backend}: {ending.seconds:.1f} s\n")
        sys.stderr.write(f"WRONG: {problem}\n{ending}\n" if problem else "")
    sys.stderr.write(f"{len(found)} runs, {wrong} wrong, in {time.monotonic() - begin:.0f} s\n")
    if not wrong and not only:
        page = DOCS / "reliability.md"
        seconds = {run: ending.seconds for run, ending in found.items()}
        page.write_text(timed(page.read_text(encoding="utf-8"), seconds), encoding="utf-8")
        integrity.MEASURED.keep(integrity.MEASURED.kept())
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
