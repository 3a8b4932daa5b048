"""Figures and tables of docs/goodput.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from benchmarks.goodput.model import Costs, best, formula, simulate, young_daly
from benchmarks.machine import about
from dev.measured import Json, Measured
from dev.pages.markdown import table

__all__ = ["ASSUMED", "INTERVALS", "MEASURED", "MTBF", "figures", "section", "tables"]

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
_COLUMNS = (
    *("MTBF", "saves", "interval by Young and Daly", "goodput, formula", "simulated", "in saves", "lost", "restarting"),
    *("best interval, simulated", "goodput"),
)


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
    runs = results["runs"]
    gib = max(each["times"].get("GiB", 0.0) for each in runs.values())
    model = f"a Llama of {results['parameters'] / 1e6:.0f} million parameters ({gib:.1f} GiB of state on each rank)"
    seconds = ((said, *(f"{each['times'][name]:.2f}" for each in runs.values())) for name, said in _TIMES.items())
    blocks = [f"{about(results['machine'])}\nSaves and resumes are those of {model}."]
    blocks += ["Seconds, measured and assumed:", table(("", *runs), seconds)]
    for name, run in runs.items():
        blocks += [f"### {name[0].upper()}{name[1:]}", tables(run["figures"])]
    return "\n\n".join(blocks)


def tables(found: list[Json]) -> str:
    """At the best interval, and by interval."""
    intervals = (f"every {each:g} min" for each in found[0]["intervals"])
    by_interval = ((*_run(each), *_shares(each["goodput"])) for each in found)
    return f"{table(_COLUMNS, map(_at_best, found))}\n\n{table(('MTBF', 'saves', *intervals), by_interval)}"


def _at_best(each: Json) -> tuple[str, ...]:
    best = (_minutes(each["best"]), *_shares([each["best goodput"]]))
    return *_run(each), _minutes(each["young daly"]), *_shares([each["formula"], *each["shares"]]), *best


def _run(each: Json) -> tuple[str, str]:
    return f"{each['mtbf']:g} h", each["kind"]


def _shares(shares: Iterable[float]) -> Iterator[str]:
    return (f"{share:.2%}" for share in shares)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"


MEASURED = Measured("goodput", "benchmarks/goodput/measured.json", {"docs/goodput.md": section})
