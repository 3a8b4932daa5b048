"""A fault, and what must come of it on both engines: a row of docs/reliability.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from dev.pages.rows import rows
from dev.ranks.judging import WARNING
from dev.ranks.scripts import Ending, Run
from unishard.testing.cells import BACKENDS

__all__ = ["BOUND", "ROWS", "WARNING", "Fault", "Row", "spanning"]

BOUND = 25.0
"""Seconds from the fault to the end of the last rank."""


class Row(NamedTuple):
    """What the page says of a fault."""

    section: str
    outcome: str
    """First line of the output, where `...` stands for what differs between runs; or what happens, if the run goes
    on."""
    kept: str
    """The newest complete checkpoint afterwards; empty if there is none."""


ROWS = {(what, where): Row(section, *said) for section, (what, where, *said, _) in rows("reliability.md")}
"""By fault and place."""


class Fault(NamedTuple):
    """A fault that a run of two ranks plays."""

    what: str
    where: str
    scenario: Callable[..., None]
    arguments: tuple[Any, ...]
    """After the backend."""
    lines: int = 2
    """Lines of ranks that end with an error, where some do."""
    short: bool = True
    """Whether `make test` may play it; not where another test of the suite does."""

    @property
    def row(self) -> Row:
        """What must come of it."""
        return ROWS[self.what, self.where]

    def run(self, backend: str) -> Run:
        """The run on an engine."""
        return self.scenario, (backend, *self.arguments)

    def wrong(self, ending: Ending) -> str:
        """What is not as it should be; empty if all is well."""
        _, outcome, kept = self.row
        goes_on = not outcome.startswith(("unishard: ", "the save "))
        code = 85 if outcome.endswith("exit code 85.") else int(not goes_on)
        told = [line for line in ending.lines if not WARNING.fullmatch(line)]
        errors = [line for line in told if line.startswith("unishard: rank ")]
        tracebacks = {line.partition("]")[0] for line in told if line.startswith("[rank")}
        first = "(?s:.*)".join(map(re.escape, outcome.split("...")))
        ends = [said.endswith(f"exit code {code} before it answered") for said in ending.codes.values()]
        checks = {
            "a rank hangs": any(said.startswith("Hung") for said in ending.codes.values()),
            "the fault did not happen": ending.seconds < 0,
            "it took too long": ending.seconds >= BOUND,
            "the first line is not the cause": not goes_on and not (told and re.fullmatch(first, told[0])),
            "a rank that goes on wrote an error": goes_on and bool(told),
            f"not {self.lines} lines of ranks": len(errors) != (0 if goes_on else self.lines),
            "two ranks wrote a traceback": len(tracebacks) > 1,
            "an error of gloo": any("gloo/" in line or "Connection closed" in line for line in told),
            "another exit code": not any(ends),
            f"the newest checkpoint is {ending.kept or 'none'}": ending.kept != kept,
        }
        return "; ".join(problem for problem, found in checks.items() if found)


def spanning(faults: list[Fault], *, by_place: bool = False) -> list[tuple[Fault, str]]:
    """Each kind of fault and, of faults with a choice of places, each place, on the engines in turn: `make test`."""
    chosen: list[tuple[Fault, str]] = []
    seen: Counter[str] = Counter()
    for fault in (fault for fault in faults if fault.short):
        if seen[fault.what] == 0 or (by_place and seen[fault.where] == 0):
            chosen.append((fault, BACKENDS[len(chosen) % len(BACKENDS)]))
            seen.update({fault.what, fault.where})
    return chosen
