"""Writes the tables of docs/performance.md from the results of a run. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.first_step.phases import PHASES, until_the_first
from benchmarks.peers.page import about

__all__ = ["BEGIN", "END", "NOT_RUN", "compiled_result", "line_of", "section", "start_result"]

BEGIN, END = "<!-- first step: written by benchmarks/first_step -->", "<!-- end of first step -->"
NOT_RUN = "Not measured yet: `make bench ONLY=first_step` writes this section."
REFERENCE = "by hand"

Json = dict[str, Any]


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
    if not results["starts"]:
        return NOT_RUN
    lines = [about(results["machine"]), f"The model is `{results['model']}` of the tables above.", ""]
    lines += [*_table(results["starts"])]
    if results["compiled"]:
        lines += [
            "",
            "With `compile: per_block`, one start each; the compiler's seconds are what step 1 takes more:",
            "",
        ]
        lines += [*_compiled(results["compiled"])]
    return "\n".join(lines)


def line_of(start: Json) -> str:
    """For the terminal."""
    return list(_table([start]))[-1]


def _table(starts: Sequence[Json]) -> Iterator[str]:
    columns = ["ranks", "engine", "loop", *PHASES[:-1], "together", "/ by hand", "CPU", "/ by hand", "step 2", "starts"]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for each in starts:
        phases = {name: f"{seconds:.2f}" for name, seconds in each["phases"].items()}
        cells = [str(each["ranks"]), each["engine"], each["name"], *(phases[name] for name in PHASES[:-1])]
        cells += [f"{each[name]:.2f}" for name in ("together", "ratio", "cpu", "cpu ratio")]
        yield f"| {' | '.join([*cells, phases['step 2'], str(each['starts'])])} |"


def _compiled(found: Sequence[Json]) -> Iterator[str]:
    yield "| ranks | engine | step 1 | compiled | compiler | from torch's cache | compiler | step 2, compiled |"
    yield "|---" * 8 + "|"
    for each in found:
        (plain, cold, warm), spent = each["step 1"], each["compile"]
        cells = [f"{seconds:.2f}" for seconds in (plain, cold, spent[0], warm, spent[1], each["step 2"][-1])]
        yield f"| {each['ranks']} | {each['engine']} | {' | '.join(cells)} |"
