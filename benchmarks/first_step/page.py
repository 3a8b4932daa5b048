"""Writes the tables of docs/performance.md from the results of a run. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.first_step.phases import PHASES, until_the_first
from benchmarks.machine import about
from dev.measured import Json, Measured
from dev.pages.markdown import line, table

__all__ = ["MEASURED", "compiled_result", "line_of", "section", "start_result"]

REFERENCE = "by hand"
_COLUMNS = ("ranks", "engine", "loop", *PHASES[:-1], "together", "/ by hand", "CPU", "/ by hand", "step 2", "starts")
_COMPILED = ("ranks", "engine", "step 1", "compiled", "compiler", "from torch's cache", "compiler", "step 2, compiled")


def start_result(world: int, engine: str, name: str, rounds: Sequence[dict[str, dict[str, float]]]) -> Json:
    """Medians of a candidate's phases, and of its ratios to `REFERENCE` of the same round."""
    own, reference = ([each[key] for each in rounds] for key in (name, REFERENCE))
    pairs = list(zip(own, reference, strict=True))
    return {
        "ranks": world,
        "engine": engine,
        "name": name,
        "starts": len(own),
        "phases": {phase: statistics.median(each[phase] for each in own) for phase in PHASES},
        "together": statistics.median(until_the_first(each) for each in own),
        "ratio": statistics.median(until_the_first(one) / until_the_first(other) for one, other in pairs),
        "cpu": statistics.median(each["cpu"] for each in own),
        "cpu ratio": statistics.median(one["cpu"] / other["cpu"] for one, other in pairs),
    }


def compiled_result(world: int, engine: str, starts: Sequence[dict[str, float]]) -> Json:
    """Of a start that is not compiled, one that is, and one whose compiled blocks torch finds in its cache."""
    plain, cold, warm = starts
    return {
        "ranks": world,
        "engine": engine,
        "step 1": [each["step 1"] for each in starts],
        "step 2": [each["step 2"] for each in starts],
        "compile": [each["step 1"] - plain["step 1"] for each in (cold, warm)],
    }


def section(results: Json) -> str:
    """The section's text."""
    blocks = [f"{about(results['machine'])}\nThe model is `{results['model']}` of the tables above."]
    blocks += [table(_COLUMNS, map(_row, results["starts"]))]
    if results["compiled"]:
        blocks += ["With `compile: per_block`, one start each; the compiler's seconds are what step 1 takes more:"]
        blocks += [table(_COMPILED, map(_compiled, results["compiled"]))]
    return "\n\n".join(blocks)


def line_of(start: Json) -> str:
    """For the terminal."""
    return line(_row(start))


def _row(start: Json) -> tuple[str, ...]:
    phases = [start["phases"][name] for name in PHASES]
    seconds = (*phases[:-1], *(start[name] for name in ("together", "ratio", "cpu", "cpu ratio")), phases[-1])
    return str(start["ranks"]), start["engine"], start["name"], *_seconds(*seconds), str(start["starts"])


def _compiled(found: Json) -> tuple[str, ...]:
    (plain, cold, warm), spent = found["step 1"], found["compile"]
    seconds = _seconds(plain, cold, spent[0], warm, spent[1], found["step 2"][-1])
    return str(found["ranks"]), found["engine"], *seconds


def _seconds(*found: float) -> Iterator[str]:
    return (f"{each:.2f}" for each in found)


MEASURED = Measured("first step", "benchmarks/first_step/measured.json", {"docs/performance.md": section})
