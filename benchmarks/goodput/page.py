"""Figures and tables of docs/goodput.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.goodput.model import Costs, best, formula, simulate, young_daly
from benchmarks.peers.page import about

__all__ = ["ASSUMED", "BEGIN", "END", "INTERVALS", "MTBF", "NOT_RUN", "figures", "section", "tables"]

BEGIN, END = "<!-- goodput: written by benchmarks/goodput -->", "<!-- end of goodput -->"
NOT_RUN = "Not measured yet: `make bench ONLY=goodput` writes this section."
MTBF = (7.9, 1.8)
"""Hours: of jobs on 1,024 GPUs, and projected for 16,384."""
INTERVALS = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0)
"""Minutes of updates between two saves."""
ASSUMED = {"notice": 10.0, "start": 300.0, "resume": 120.0, "save": 120.0, "blocks": 12.0, "complete": 120.0}
"""Seconds on a large cluster, which nobody has measured here."""
LIVES, SEED = 4000, 0
_TIMES = {
    "notice": "a failure, until the last rank has ended",
    "start": "a start, until the first step",
    "resume": "a resume",
    "save": "a save",
    "blocks": "a save in the background, until updates go on",
    "complete": "a save in the background, until it is complete",
}
_HEAD = "| MTBF | saves | interval by Young and Daly | goodput, formula | simulated | in saves | lost | restarting |"

Json = dict[str, Any]


def kinds(times: Mapping[str, float]) -> dict[str, Costs]:
    """What a run costs by the kind of its saves."""
    restart = times["notice"] + times["start"] + times["resume"]
    found = {"wait": Costs(times["save"], 0.0, restart)}
    if "blocks" in times:
        found["in the background"] = Costs(times["blocks"], times["complete"] - times["blocks"], restart)
    return found


def figures(
    times: Mapping[str, float], mtbf: tuple[float, ...] = MTBF, intervals: tuple[float, ...] = INTERVALS
) -> list[Json]:
    """Simulate each MTBF (hours) and kind of save, at every interval (minutes) and at the best one."""
    found = []
    for hours in mtbf:
        for kind, costs in kinds(times).items():
            mean, first = 3600 * hours, young_daly(costs, 3600 * hours)
            top, shares = best(costs, mean, lives=LIVES, seed=SEED)
            at = [simulate(60 * each, costs, mean, lives=LIVES, seed=SEED).useful for each in intervals]
            found.append(
                {
                    "mtbf": hours,
                    "kind": kind,
                    "young daly": first,
                    "formula": formula(first, costs, mean),
                    "shares": list(simulate(first, costs, mean, lives=LIVES, seed=SEED)),
                    "best": top,
                    "best goodput": shares.useful,
                    "intervals": list(intervals),
                    "goodput": at,
                }
            )
    return found


def section(results: Json) -> str:
    """The generated part of the page."""
    if not results["runs"]:
        return NOT_RUN
    runs = results["runs"]
    gib = max(each["times"].get("GiB", 0.0) for each in runs.values())
    model = f"a Llama of {results['parameters'] / 1e6:.0f} million parameters ({gib:.1f} GiB of state on each rank)"
    lines = [about(results["machine"]), f"Saves and resumes are those of {model}.", ""]
    lines += ["Seconds, measured and assumed:", "", *_costs(results)]
    for name in runs:
        lines += ["", f"### {name[0].upper()}{name[1:]}", "", *tables(runs[name]["figures"])]
    return "\n".join(lines)


def tables(found: list[Json]) -> Iterator[str]:
    """At the best interval, and by interval."""
    yield f"{_HEAD} best interval, simulated | goodput |"
    yield "|---" * 10 + "|"
    for each in found:
        useful, saves, lost, restarts = (f"{share:.2%}" for share in each["shares"])
        yield (
            f"| {each['mtbf']:g} h | {each['kind']} | {_minutes(each['young daly'])} | {each['formula']:.2%} "
            f"| {useful} | {saves} | {lost} | {restarts} | {_minutes(each['best'])} | {each['best goodput']:.2%} |"
        )
    intervals = found[0]["intervals"]
    yield ""
    yield f"| MTBF | saves | {' | '.join(f'every {each:g} min' for each in intervals)} |"
    yield "|---" * (2 + len(intervals)) + "|"
    for each in found:
        yield f"| {each['mtbf']:g} h | {each['kind']} | {' | '.join(f'{share:.2%}' for share in each['goodput'])} |"


def _costs(results: Json) -> Iterator[str]:
    runs = results["runs"]
    yield f"| | {' | '.join(runs)} |"
    yield "|---" * (1 + len(runs)) + "|"
    for name, said in _TIMES.items():
        seconds = [f"{each['times'][name]:.2f}" for each in runs.values()]
        yield f"| {said} | {' | '.join(seconds)} |"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"
