"""Plays every fault on both engines and writes docs/reliability.md with what came of them: `make faults`."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from faulting import TIMEOUT, Ending, endings
from soak.run import SECTION

from faults import SUBJECTS
from faults.fault import BOUND, Elsewhere, Fault, Subject
from unishard.config.communication import Communication
from unishard.failures.heartbeat import TIMEOUTS
from unishard.testing.cells import BACKENDS

__all__ = ["page", "without_times"]

_HEAD = f"""\
# Reliability

What happens after a fault of one rank or one disk. Written by `make faults`, which plays each fault on {" and ".join(BACKENDS)}: 2 ranks
on the CPU, started as a launcher starts a script,
`communication.desync_timeout` of {TIMEOUT:.0f} s ({TIMEOUT / 2:.0f} s where a rank is stopped;
the default is {Communication().desync_timeout:.0f} s), a checkpoint after update 12, and the fault in update 13. `make test` plays a part
of them. In every run

- every other rank ends within {BOUND:.0f} s, or all continue;
- the first line of the output is the cause, with at most one traceback; every other rank writes one line;
- the newest complete checkpoint is the one listed, undamaged: a run that is started again resumes from it
  ([checkpoints.md](checkpoints.md)).

`...` is text that differs between runs. Lines that torch and DeepSpeed log themselves may precede the first line. [desync.md](desync.md)
explains how ranks notice each other's faults. A rank that is stopped is found {TIMEOUTS} times `communication.desync_timeout` after another
one began to wait for it; after `prepare` that takes `communication.desync_check`. If it is killed or stopped before its first call of
unishard, the others wait, with a warning after 10 s: torchrun and srun end the other ranks of one that is killed.

The last column has the seconds from the fault until the last other rank has ended, or has continued, on {" / ".join(BACKENDS)}, while
three other runs shared the cores. Only a whole `make faults` fills it.
"""
_TIMES = re.compile(r"\d+\.\d / \d+\.\d(?= \|$)", re.MULTILINE)


Times = Mapping[tuple[Fault, str], float]
"""Seconds that a fault took on an engine."""


def page(times: Times) -> str:
    """The page, as Markdown."""
    return "\n".join((_HEAD, *(line for subject in SUBJECTS for line in _section(subject, times)), SECTION))


def without_times(text: str) -> str:
    """The page with an empty last column: what does not differ from one run to the next."""
    return _TIMES.sub("", text)


def _section(subject: Subject, times: Times) -> Iterator[str]:
    yield f"## {subject.title}\n"
    yield (
        "| Fault | Where | First line of the output, or what happens | Newest checkpoint | Seconds "
        "|\n|---|---|---|---|---|"
    )
    order = list(dict.fromkeys(row.what for row in subject.rows))
    places = list(dict.fromkeys(row.where for row in subject.rows))
    for row in sorted(subject.rows, key=lambda row: (order.index(row.what), places.index(row.where))):
        yield f"| {' | '.join(_cells(row, times))} |"
    yield ""


def _cells(row: Fault | Elsewhere, times: Times) -> Iterator[str]:
    yield from (each.replace("|", "\\|") for each in (row.what, row.where, row.outcome))
    yield "" if isinstance(row, Elsewhere) else row.kept
    took = [times[row, backend] for backend in BACKENDS if (row, backend) in times]
    yield " / ".join(f"{each:.1f}" for each in took) if len(took) == len(BACKENDS) else ""


def play(asked: list[tuple[Fault, str]]) -> dict[tuple[Fault, str], Ending]:
    """How each run ended; says which ended otherwise than listed."""
    runs = [fault.run(backend) for fault, backend in asked]
    return dict(zip(asked, endings(tuple(runs)).values(), strict=True))


def main() -> int:
    """Play every fault and write the page, unless one ended otherwise than listed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="play what contains this, such as 'kill -9' or SIGTERM; writes no page",
    )
    asked = parser.parse_args()
    begin = time.monotonic()
    found = play(
        [
            run
            for subject in SUBJECTS
            for run in subject.every()
            if asked.only in f"{run[0].what}, {run[0].where}, {run[1]}"
        ]
    )
    wrong = 0
    for (fault, backend), ending in found.items():
        problem = fault.wrong(ending)
        wrong += bool(problem)
        sys.stderr.write(f"{fault.what}, {fault.where}, {backend}: {ending.seconds:.1f} s\n")
        sys.stderr.write(f"WRONG: {problem}\n{ending}\n" if problem else "")
    sys.stderr.write(f"{len(found)} runs, {wrong} wrong, in {time.monotonic() - begin:.0f} s\n")
    if not wrong and not asked.only:
        asked.page.write_text(page({run: ending.seconds for run, ending in found.items()}), encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
