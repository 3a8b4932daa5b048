"""A fault, and what must come of it on both engines: a row of docs/reliability.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from faulting import Ending

from unishard.testing.cells import BACKENDS

__all__ = ["BOUND", "GONE", "WARNING", "Elsewhere", "Fault", "Subject"]

BOUND = 25.0
"""Seconds from the fault to the end of the last rank."""
GONE = "is gone: its process ended without an error..."
WARNING = re.compile(
    r"rank \d has (waited|been) .*|a signal to .*|\[Rank \d\] \[deepspeed\] .*|(\[rank\d\]:)?\[W\d+ .*|Exception "
    r"raised from .*|frame #\d+: .*|<omitting python frames>|"
)
"""What ranks log before it is clear that the run cannot go on: unishard, DeepSpeed, and torch with a stack in C++."""

Run = tuple[Callable[..., None], tuple[Any, ...]]


class Fault(NamedTuple):
    """A fault that a run of two ranks plays."""

    what: str
    where: str
    outcome: str
    """First line of the output, where `...` stands for what differs between runs; or what happens, if the run goes
    on."""
    scenario: Callable[..., None]
    arguments: tuple[Any, ...]
    """After the backend."""
    kept: str = ""
    """The newest complete checkpoint afterwards; empty if there is none."""
    lines: int = 2
    """Lines of ranks that end with an error."""
    code: int = 1
    """Exit code of a rank that lives."""
    short: bool = True
    """Whether `make test` may play it; not where another test of the suite does."""

    def run(self, backend: str) -> Run:
        """The run on an engine."""
        return self.scenario, (backend, *self.arguments)

    @property
    def goes_on(self) -> bool:
        """Whether no rank raises an error."""
        return self.lines == 0

    def wrong(self, ending: Ending) -> str:
        """What is not as it should be; empty if all is well."""
        told = [line for line in ending.lines if not WARNING.fullmatch(line)]
        errors = [line for line in told if line.startswith("unishard: rank ")]
        tracebacks = {line.partition("]")[0] for line in told if line.startswith("[rank")}
        first = "(?s:.*)".join(map(re.escape, self.outcome.split("...")))
        checks = {
            "a rank hangs": any(code.startswith("Hung") for code in ending.codes.values()),
            "the fault did not happen": ending.seconds < 0,
            "it took too long": ending.seconds >= BOUND,
            "the first line is not the cause": not self.goes_on and not (told and re.fullmatch(first, told[0])),
            "a rank that goes on wrote an error": self.goes_on and bool(told),
            f"not {self.lines} lines of ranks": len(errors) != self.lines,
            "two ranks wrote a traceback": len(tracebacks) > 1,
            "an error of gloo": any("gloo/" in line or "Connection closed" in line for line in told),
            "another exit code": not any(
                code.endswith(f"exit code {self.code} before it answered") for code in ending.codes.values()
            ),
            f"the newest checkpoint is {ending.kept or 'none'}": ending.kept != self.kept,
        }
        return "; ".join(problem for problem, found in checks.items() if found)


class Elsewhere(NamedTuple):
    """A fault that a test of its own plays."""

    what: str
    where: str
    outcome: str
    test: str
    """The function, as `tests/ranks/test_x.py::test_y`."""


class Subject:
    """The faults of one subject: a section of the page."""

    def __init__(self, title: str, *, by_place: bool = False) -> None:
        self.title, self.by_place = title, by_place
        self.rows: list[Fault | Elsewhere] = []

    def played(self) -> Iterator[Fault]:
        """Those that have a scenario."""
        return (row for row in self.rows if isinstance(row, Fault))

    def every(self) -> list[tuple[Fault, str]]:
        """Each on every engine: `make faults`."""
        return [(fault, backend) for fault in self.played() for backend in BACKENDS]

    def spanning(self) -> list[tuple[Fault, str]]:
        """Each kind of fault and, of faults with a choice of places, each place, on the engines in turn:
        `make test`."""
        chosen: list[tuple[Fault, str]] = []
        seen: Counter[str] = Counter()
        for fault in (fault for fault in self.played() if fault.short):
            if seen[fault.what] == 0 or (self.by_place and seen[fault.where] == 0):
                chosen.append((fault, BACKENDS[len(chosen) % len(BACKENDS)]))
                seen.update({fault.what, fault.where})
        return chosen
