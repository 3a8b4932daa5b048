"""Plays every fault on both engines and writes docs/reliability.md with what came of them: `make faults`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from faulting import TIMEOUT, Ending, endings

from faults import SUBJECTS
from faults.fault import BOUND, Elsewhere, Fault, Subject
from unishard.distributed.silence import TIMEOUTS
from unishard.testing.cells import BACKENDS

__all__ = ["page"]

_HEAD = f"""\
# Reliability

What comes of a fault of one rank or one disk. Written by `make faults`, which plays each fault on {" and ".join(BACKENDS)}: 2 ranks on the
CPU, started as a launcher starts a script, `communication.desync_timeout` of {TIMEOUT:.0f} s ({TIMEOUT / 2:.0f} s where a rank is stopped;
the default is 30 s), a checkpoint after update 12, and the fault in update 13. `make test` plays a part of them. In every run

- every rank that lives ends within {BOUND:.0f} s, or all go on;
- the first line of the output is the cause, with at most one traceback; every other rank writes one line;
- the newest complete checkpoint is the one listed, undamaged: a run that is started again resumes from it
  ([checkpoints.md](checkpoints.md)).

`...` stands for what differs between runs. What torch and DeepSpeed log themselves may stand before the first line. [desync.md](desync.md)
explains how ranks notice each other's faults. A rank that is stopped is found {TIMEOUTS} times `communication.desync_timeout` after another
one began to wait for it; that takes `communication.desync_check`. One that is killed or stopped before its first call of unishard is only
waited for, with a warning after 10 s: torchrun and srun end the other ranks of one that is killed.
"""


def page() -> str:
    """The page, as Markdown."""
    return "\n".join((_HEAD, *(line for subject in SUBJECTS for line in _section(subject))))


def _section(subject: Subject) -> Iterator[str]:
    yield f"## {subject.title}\n"
    yield "| Fault | Where | First line of the output, or what happens | Newest checkpoint | Ends within |\n|---|---|---|---|---|"
    order = list(dict.fromkeys(row.what for row in subject.rows))
    places = list(dict.fromkeys(row.where for row in subject.rows))
    for row in sorted(subject.rows, key=lambda row: (order.index(row.what), places.index(row.where))):
        yield f"| {' | '.join(_cells(row))} |"
    yield ""


def _cells(row: Fault | Elsewhere) -> Iterator[str]:
    yield from (each.replace("|", "\\|") for each in (row.what, row.where, row.outcome))
    if isinstance(row, Elsewhere):
        yield from ("", "")
    else:
        yield row.kept
        yield "goes on" if row.goes_on and row.code == 0 else f"{BOUND:.0f} s"


def play(asked: list[tuple[Fault, str]]) -> dict[tuple[Fault, str], Ending]:
    """How each run ended; says which ended otherwise than listed."""
    runs = [fault.run(backend) for fault, backend in asked]
    return dict(zip(asked, endings(tuple(runs)).values(), strict=True))


def main(path: Path) -> int:
    """Play every fault and write the page, unless one ended otherwise than listed."""
    begin = time.monotonic()
    found = play([run for subject in SUBJECTS for run in subject.every()])
    wrong = [
        f"{fault.what}, {fault.where}, {backend}: {problem}\n{ending}"
        for (fault, backend), ending in found.items()
        if (problem := fault.wrong(ending))
    ]
    for each in wrong:
        sys.stderr.write(f"WRONG: {each}\n")
    sys.stderr.write(f"{len(found)} runs, {len(wrong)} wrong, in {time.monotonic() - begin:.0f} s\n")
    if not wrong:
        path.write_text(page(), encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
